"""Settings that have no effect under the other settings of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.advantages.returns import Zero
from agent_r1.algorithms.loss_terms import SecondMoment
from agent_r1.algorithms.ops import importance_ratio
from agent_r1.algorithms.policy_losses import PolicyLoss
from agent_r1.algorithms.registry import parameters
from agent_r1.algorithms.types import TokenOutputs
from agent_r1.rollout.context_policy import Append, build_context_policy
from agent_r1.training.config import TrainConfig

ROUNDING = 1e-3
"""An upper bound of the difference between the log-probabilities of a token in trainer and engine.

The bound holds if trainer and engine have equal float32 weights. If pi is the probability of the token in the trainer,
and mu its probability in the engine, then |log(pi / mu)| is at most this number.
"""

TOLERANCE = 10 * ROUNDING
"""Two importance weights, or two gradients, count as equal if their difference is below this number."""


@dataclass(frozen=True, slots=True)
class InactiveSettings:
    """Settings that have no effect, and the reason.

    Attributes:
        keys: the dotted keys of the settings. A key such as ``algorithm.correction`` includes
            ``algorithm.correction.NAME`` for every NAME.
        reason: why the settings have no effect, and which other settings to change.
    """

    keys: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(self.keys)} cannot act: {self.reason}"


def inactive_settings(config: TrainConfig) -> tuple[InactiveSettings, ...]:
    """Return the algorithm's settings that cannot change any update of the run, grouped by reason."""
    found = (_of_ratio(config), _of_mismatch(config), _of_critic(config), _of_limits(config))
    return tuple(settings for group in found for settings in group)


def chosen_inactive_settings(config: TrainConfig) -> Iterator[InactiveSettings]:
    """Yield the settings of algorithm and trainer that differ from the defaults, but have no effect on the run."""
    default, chosen = _settings(TrainConfig()), _settings(config)
    for settings in (*inactive_settings(config), *_of_ranks(config)):
        keys = tuple(key for key in settings.keys if _values(chosen, key) != _values(default, key))
        if keys:
            yield replace(settings, keys=keys)


def _settings(config: TrainConfig) -> dict[str, object]:
    of_algorithm = {f"algorithm.{name}": value for name, value in parameters(config.algorithm).items()}
    return {**of_algorithm, **{f"trainer.{name}": value for name, value in config.trainer}}


def _values(settings: Mapping[str, object], key: str) -> dict[str, object]:
    return {own: value for own, value in settings.items() if own == key or own.startswith(f"{key}.")}


def _of_ratio(config: TrainConfig) -> Iterator[InactiveSettings]:
    algorithm, loss = config.algorithm, config.algorithm.loss
    fields = [f"algorithm.loss.{field}" for field, value in loss if field != "name" and value is not None]
    if isinstance(algorithm.advantage, Zero) and not loss.regularizes:
        if fields:
            yield InactiveSettings(tuple(fields), "the advantage is always 0; name another algorithm.advantage")
        return
    if not loss.uses_ratio or _policy_steps(config) > 1:
        return
    from_sampler = algorithm.ratio_denominator == "sampler"
    # If stale samples have a correction, pi_old is the policy before the update (PolicyUpdater._prepare).
    is_corrected = algorithm.correction is not None and not from_sampler
    if not (_samples_match(config) if from_sampler else config.max_staleness == 0 or is_corrected):
        return
    batch = "per batch" if is_corrected else "per batch of fresh samples"
    why = f"with one optimizer step {batch} r is 1"
    do = f"set trainer.minibatches{' or' if is_corrected else ','} algorithm.epochs"
    do += "" if is_corrected else " or max_staleness"
    if _is_policy_gradient(loss, ROUNDING if from_sampler else 0.0):
        keys = ["algorithm.loss", *fields]
        keys += ["algorithm.ratio_level"] if algorithm.ratio_level != "token" else []
        keys += ["algorithm.ratio_denominator"] if from_sampler else []
        yield InactiveSettings(tuple(keys), f"{why}, and each loss has the gradient of A log pi; {do}")
    if algorithm.kl_cov is not None:
        yield InactiveSettings(("algorithm.kl_cov",), f"{why}, and |log r| has no gradient; {do}")


def _of_mismatch(config: TrainConfig) -> Iterator[InactiveSettings]:
    algorithm = config.algorithm
    if not _samples_match(config):
        return
    log_ratio = torch.tensor([-ROUNDING, 0.0, ROUNDING])
    unit, keys = torch.arange(3), []
    if algorithm.correction is not None:
        weight = algorithm.correction.weight(log_ratio, unit)
        keys += ["algorithm.correction"] if bool(((weight - 1).abs() < TOLERANCE).all()) else []
    if algorithm.rejection is not None and bool(algorithm.rejection.accepted(log_ratio, unit).all()):
        keys.append("algorithm.rejection")
    if isinstance(algorithm.token_mask, SecondMoment) and algorithm.token_mask.threshold > ROUNDING**2:
        keys.append("algorithm.token_mask")
    if keys:
        reason = "fresh samples of a float32 engine have the log-probabilities of a float32 trainer"
        yield InactiveSettings(tuple(keys), f"{reason}; set max_staleness, or leave them out")
    # This mask compares mu with the policy of the current minibatch, which each optimizer step changes.
    mask = algorithm.off_policy_mask
    if mask is not None and mask.threshold > ROUNDING and _policy_steps(config) == 1:
        reason = "with one optimizer step per batch of fresh samples in float32, pi is mu"
        do = "set trainer.minibatches, algorithm.epochs or max_staleness"
        yield InactiveSettings(("algorithm.off_policy_mask",), f"{reason}; {do}")


def _of_critic(config: TrainConfig) -> Iterator[InactiveSettings]:
    epochs, minibatches = config.trainer.critic_epochs, config.trainer.critic_minibatches
    steps = _policy_steps(config) if epochs is None else epochs * minibatches
    if isinstance(config.algorithm.advantage, WithCritic) and steps == 1:
        do = "set trainer.critic_epochs and trainer.critic_minibatches"
        reason = f"the critic takes one optimizer step per batch, before which V is V_old; {do}"
        yield InactiveSettings(("algorithm.advantage.value_clip",), reason)


def _of_limits(config: TrainConfig) -> Iterator[InactiveSettings]:
    algorithm, overlong, kl = config.algorithm, config.algorithm.shaping.overlong, config.algorithm.kl
    if overlong is not None and isinstance(build_context_policy(config.context_policy), Append):
        start = overlong.max_tokens - overlong.cache_tokens
        if start >= config.context:
            reason = f"the penalty begins at {start} action tokens, and the context has {config.context} tokens"
            do = "unless the chat template drops earlier text; set overlong.max_tokens or context"
            yield InactiveSettings(("algorithm.shaping.overlong",), f"{reason}, {do}")
    if kl is not None and kl.sync_steps >= config.steps:
        reason = f"the run has only {config.steps} steps; set fewer sync_steps"
        yield InactiveSettings(("algorithm.kl.sync_steps", "algorithm.kl.sync_alpha"), reason)
    limit = algorithm.filters.staleness
    if limit is not None and limit >= config.max_staleness:
        reason = f"no sample is older than max_staleness, which is {config.max_staleness}; set fewer updates"
        yield InactiveSettings(("algorithm.filters.staleness",), reason)


def _of_ranks(config: TrainConfig) -> Iterator[InactiveSettings]:
    if config.trainer.ranks == 1:
        reason = "with one rank, no process of the trainer is started; set trainer.ranks"
        yield InactiveSettings(("trainer.rank_restarts",), reason)


def _policy_steps(config: TrainConfig) -> int:
    return config.algorithm.epochs * config.trainer.minibatches


def _samples_match(config: TrainConfig) -> bool:
    if config.decode.method != "plain":
        return False
    return config.max_staleness == 0 and config.engine.dtype == config.trainer.dtype == "float32" and not config.tf32


def _is_policy_gradient(loss: PolicyLoss, spread: float) -> bool:
    advantage = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    # log pi = 0: a change of r then changes the probability pi most
    logprobs = torch.zeros(6, requires_grad=True)
    old_logprobs = spread * torch.tensor([-1.0, 0.0, 1.0, -1.0, 0.0, 1.0])
    tokens = TokenOutputs(
        logprobs=logprobs, entropy=torch.zeros(6), old_logprobs=old_logprobs, ratio_unit=torch.arange(6)
    )
    try:
        loss.compute(importance_ratio(logprobs, old_logprobs), advantage, tokens).sum().backward()
    except Exception:  # a user's loss can raise any error
        return False
    return logprobs.grad is not None and bool(((logprobs.grad + advantage).abs() < TOLERANCE).all())

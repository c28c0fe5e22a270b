"""Forward and backward passes of the models over a batch, in micro-batches.

Shapes: N tokens and S turns in the batch; n tokens and s turns in a micro-batch of B sequences padded to T tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.types import StateValues, TokenOutputs, TokenWeights, ValueTargets
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.micro_batches import MicroBatch, by_sequence, by_trajectory, make_micro_batches
from agent_r1.data.segments import unique_ids
from agent_r1.data.sequences import TokenSequence
from agent_r1.model.forward import hidden_states, token_scores
from agent_r1.model.value_head import ValueModel
from agent_r1.trainer.protocol import MODULES, POLICY, Module, PassStats, PreparedBatch, Role


@dataclass(frozen=True, slots=True, eq=False)
class ModelSet:
    """The models of an algorithm, on one device.

    ``temperature`` is the sampler's. A micro-batch has at most ``micro_tokens`` tokens. ``critic``, ``reference`` and
    ``teacher`` are None if the algorithm does not need them.
    """

    policy: PreTrainedModel
    temperature: float
    micro_tokens: int
    critic: ValueModel | None = None
    reference: PreTrainedModel | None = None
    teacher: PreTrainedModel | None = None

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        """Return the log-probability of each token, (N,) float64 on the CPU; 0 for tokens in none of the sequences."""
        model = {"policy": self.policy, "reference": self.reference, "teacher": self.teacher}[role]
        if model is None:
            raise ValueError(f"this algorithm has no {role}")
        logprobs = torch.zeros(len(batch.ids), dtype=torch.float64)
        for micro in self.micro_batches(by_sequence(batch.sequences)):
            logprobs[micro.tokens] = score_tokens(model, batch, micro, self.temperature)[0].double().cpu()
        return logprobs

    @torch.no_grad()
    def entropy(self, batch: TrainingBatch) -> Tensor:
        """Return the policy's entropy at each token, (N,) float64 on the CPU; 0 for tokens in none of the sequences."""
        entropy = torch.zeros(len(batch.ids), dtype=torch.float64)
        for micro in self.micro_batches(by_sequence(batch.sequences)):
            entropy[micro.tokens] = score_tokens(self.policy, batch, micro, self.temperature)[1].double().cpu()
        return entropy

    @torch.no_grad()
    def values(self, batch: TrainingBatch) -> StateValues:
        """Return the critic's values before each token and after each turn's action, float64 on the CPU."""
        if self.critic is None:
            raise ValueError("this algorithm has no critic")
        before_token = torch.zeros(len(batch.ids), dtype=torch.float64)
        after_action = torch.zeros(len(batch.turn_trajectory), dtype=torch.float64)
        for micro in self.micro_batches(by_sequence(batch.sequences)):
            values = self.critic(micro.ids, micro.position_ids, micro.attention_mask).flatten().double().cpu()  # (B*T,)
            before_token[micro.tokens] = values[micro.logit_positions.cpu()]
            after_action[micro.turns] = values[micro.post_action_states.cpu()]
        return StateValues(before_token, after_action)

    def micro_batches(self, blocks: Sequence[Sequence[TokenSequence]]) -> Iterator[MicroBatch]:
        """Yield the sequences in micro-batches on the models' device; a block is never divided."""
        return (micro.to(self.policy.device) for micro in make_micro_batches(blocks, self.micro_tokens))


def blocks_of(sequences: Sequence[TokenSequence], algorithm: Algorithm) -> list[tuple[TokenSequence, ...]]:
    """Return blocks of sequences that must share a micro-batch: a trajectory's, if the algorithm needs all of it."""
    return by_trajectory(sequences) if algorithm.needs_whole_trajectories else by_sequence(sequences)


def score_tokens(
    model: PreTrainedModel, batch: TrainingBatch, micro: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy (n,) of the micro-batch's tokens."""
    hidden = hidden_states(model, micro.ids, micro.position_ids, micro.attention_mask).flatten(0, 1)  # (B*T, H)
    targets = batch.ids[micro.tokens].to(hidden.device)  # (n,)
    # The head is applied only to the n hidden states that predict a token of the batch, not to all B*T.
    return token_scores(model, hidden[micro.logit_positions], targets, temperature, entropy_gradient=entropy_gradient)


def forward_backward(
    models: ModelSet,
    algorithm: Algorithm,
    prepared: PreparedBatch,
    scale: float = 1.0,
    modules: Collection[Module] = MODULES,
) -> PassStats:
    """Add the gradient of ``scale`` times the loss of the batch's sequences (at least one) to ``modules``."""
    micros = models.micro_batches(blocks_of(prepared.batch.sequences, algorithm))
    return join_passes([_micro_batch_pass(models, algorithm, prepared, micro, scale, modules) for micro in micros])


def _micro_batch_pass(
    models: ModelSet,
    algorithm: Algorithm,
    prepared: PreparedBatch,
    micro: MicroBatch,
    scale: float,
    modules: Collection[Module],
) -> PassStats:
    """Add the gradient of one micro-batch: logits -> log-probabilities -> ratio -> loss."""
    batch, outputs, tokens = prepared.batch, prepared.outputs, micro.tokens

    # log pi(token | context) at the sampler's temperature, and the entropy of that distribution: (n,) each
    with torch.set_grad_enabled(POLICY in modules):
        logprobs, entropy = score_tokens(models.policy, batch, micro, models.temperature, algorithm.entropy_coef > 0)

    def gather(column: Tensor, indices: Tensor) -> Tensor:
        return column[indices].to(logprobs)  # the batch is float64 on the CPU

    # ratio = pi / pi_old. Observations were not sampled by any policy: for them old = current, so their ratio is 1.
    old = logprobs.detach()
    action_mask = batch.action_mask[tokens]
    sampler = torch.where(action_mask.to(old.device), gather(batch.sampler_logprobs, tokens), old)
    if prepared.old_logprobs is not None:
        old = torch.where(action_mask.to(old.device), gather(prepared.old_logprobs, tokens), old)
    ratios = (logprobs.detach() - old).exp()

    # Tokens of a unit share the ratio. Actions and observations are separate units: observations would dilute the mean.
    unit = algorithm.ratio_unit(batch)  # (N,)
    ratio_unit = None if unit is None else unique_ids(unit[tokens], action_mask).to(old.device)  # (n,)
    trajectory = None
    if algorithm.off_policy_mask is not None:
        trajectory = unique_ids(batch.token_trajectory[tokens], action_mask).to(old.device)  # (n,)

    values = old_values = None
    if models.critic is not None and outputs.values is not None:
        flat = models.critic(micro.ids, micro.position_ids, micro.attention_mask).flatten()  # (B*T,)
        values = StateValues(flat[micro.logit_positions], flat[micro.post_action_states])  # (n,) and (s,)
        old_values = _state_values_at(outputs.values, micro, logprobs)

    reference = None if outputs.reference_logprobs is None else gather(outputs.reference_logprobs, tokens)
    token_outputs = TokenOutputs(logprobs, entropy, old, ratio_unit, reference, values, old_values, sampler, trajectory)
    loss, metrics = algorithm.compute_loss(token_outputs, _scaled_weights(prepared.weights, micro, scale, logprobs))
    loss.backward()
    return PassStats(
        loss=loss.detach(),
        metrics=metrics,
        tokens=tokens,
        logprobs=logprobs.detach(),
        ratios=ratios,
        entropy=entropy.detach(),
        num_tokens=micro.num_tokens,
        num_padded_tokens=micro.ids.numel(),
    )


def _state_values_at(values: StateValues, micro: MicroBatch, like: Tensor) -> StateValues:
    """Return the values of the micro-batch's states, (n,) and (s,), in dtype and device of ``like``."""
    return StateValues(values.before_token[micro.tokens].to(like), values.after_action[micro.turns].to(like))


def _scaled_weights(weights: TokenWeights, micro: MicroBatch, scale: float, like: Tensor) -> TokenWeights:
    """Return the weights of the micro-batch's tokens in dtype and device of ``like``, loss weights times ``scale``."""

    def gather(column: Tensor) -> Tensor:
        return column[micro.tokens].to(like)

    targets = weights.value_targets
    if targets is not None:
        weight = _state_values_at(targets.weight, micro, like)
        scaled = StateValues(scale * weight.before_token, scale * weight.after_action)
        targets = ValueTargets(_state_values_at(targets.target, micro, like), scaled)
    return TokenWeights(
        advantage=gather(weights.advantage),
        loss_weight=scale * gather(weights.loss_weight),
        importance_weight=gather(weights.importance_weight),
        sft_weight=None if weights.sft_weight is None else scale * gather(weights.sft_weight),
        value_targets=targets,
        kl_coef=weights.kl_coef,
        drift_weight=None if weights.drift_weight is None else gather(weights.drift_weight),
    )


def join_passes(parts: Sequence[PassStats]) -> PassStats:
    """Merge the statistics of passes over disjoint tokens into one, on the CPU. Losses and metrics are summed."""
    return PassStats(
        loss=torch.stack([part.loss for part in parts]).sum().cpu(),
        metrics={name: torch.stack([part.metrics[name] for part in parts]).sum().cpu() for name in parts[0].metrics},
        tokens=torch.cat([part.tokens for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]).cpu(),
        ratios=torch.cat([part.ratios for part in parts]).cpu(),
        entropy=torch.cat([part.entropy for part in parts]).cpu(),
        num_tokens=sum(part.num_tokens for part in parts),
        num_padded_tokens=sum(part.num_padded_tokens for part in parts),
    )

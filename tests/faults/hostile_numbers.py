"""Wrong probabilities, gradients and weights, and too little memory (T15, T17, T20)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from fault_case import Case, Outcome
from hostile_runs import CONTINUED, RUN, RunRecord, case, control, small_taskset, train

from agent_r1.core.errors import RunStopped
from agent_r1.core.inference import Completion, PolicyVersion, Prompt, SamplingParams, WeightUpdate
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.weights import weights_checksum
from agent_r1.trainer import forward_backward
from agent_r1.trainer.protocol import PassStats
from agent_r1.trainer.updater import NOT_FINITE
from agent_r1.training import build as services, monitor as health_monitor


def stopped_by(record: RunRecord, check: str) -> list[str]:
    """Return the violations of a run that this check must stop."""
    broken = list(record.violations_if(completed=False))
    if record.error is not None and not (isinstance(record.error, RunStopped) and f"{check}:" in str(record.error)):
        broken.append(f"it was stopped not by {check} but by: {record.error}")
    return broken


def shifted_logprobs(seed: int, by: float = 0.05, **settings: Any) -> Outcome:
    """The engine's log-probabilities are slightly wrong, as with another temperature or kernel."""
    fired = Counter[str]()

    class Shifted(TorchEngine):
        async def generate(
            self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None
        ) -> Completion:
            completion = await super().generate(prompt, params, session_id=session_id)
            fired["generations"] += (session_id or "").startswith(f"{RUN}:")
            return replace(completion, logprobs=tuple(logprob - by for logprob in completion.logprobs))

    record = train(small_taskset(), seed, (patch.object(services, "TorchEngine", Shifted),), steps=6, **settings)
    broken = stopped_by(record, "logprob_gap")
    if record.error is not None and (len(record.warnings), len(record.metrics)) != (1, 3):
        broken.append(f"{len(record.warnings)} warnings in {len(record.metrics)} steps instead of one in three")
    return Outcome(fired["generations"], tuple(broken))


def spoiled_gradients(seed: int, **settings: Any) -> Outcome:
    """From the second step on, a gradient is NaN or infinite."""
    fired, updates = Counter[str](), itertools.count(1)
    spoil = (float("nan"), float("inf"))[seed % 2]

    def learned(*arguments: Any) -> PassStats:
        seen = LEARN(*arguments)
        if next(updates) == 1:
            return seen
        fired["updates"] += 1
        for parameter in itertools.islice(arguments[0].policy.parameters(), 1):
            parameter.grad.view(-1)[0] = spoil
        return seen

    record = train(
        small_taskset(),
        seed,
        (patch("agent_r1.trainer.single_process.forward_backward", learned),),
        steps=6,
        **settings,
    )
    broken = stopped_by(record, "skipped_steps")
    if record.error is not None and (len(record.checksums), len(record.metrics)) != (2, 4):
        broken.append(f"{len(record.checksums)} versions in {len(record.metrics)} steps instead of two in four")
    late = [fate for fate in record.fates.values() if fate.step > 1]
    if not late or {fate.reason for fate in late} != {NOT_FINITE}:
        broken.append("attempts of skipped steps do not have that reason")
    return Outcome(fired["updates"], tuple(broken))


LEARN = forward_backward.forward_backward


def undelivered_weights(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """From the second step on the engine keeps older weights, in all tensors or in one."""
    fired = Counter[str]()

    class Keeping(TorchEngine):
        def _load_weights(self, update: WeightUpdate) -> PolicyVersion:
            model, stale = self._runner.model, {}
            if update.version.number > 1:
                fired["loads"] += 1
                stale = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            super()._load_weights(update)
            names = list(stale)[-1:] if seed % 2 else list(stale)
            model.load_state_dict({name: stale[name] for name in names}, strict=False)
            return replace(update.version, checksum=weights_checksum(model))

    record = train(small_taskset(), seed, (patch.object(services, "TorchEngine", Keeping), *patches))
    broken = stopped_by(record, "weights")
    if record.error is not None and len(record.metrics) != 2:
        broken.append(f"{len(record.metrics)} steps were taken, but the second should have been the last")
    return Outcome(fired["loads"], tuple(broken))


def out_of_memory(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """The first pass runs out of memory late, when its gradients exist."""
    fired = Counter[str]()

    def scarce(*arguments: Any) -> PassStats:
        seen = PASS(*arguments)
        if not fired["passes"]:
            fired["passes"] += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {seen.num_padded_tokens} KiB")
        return seen

    # no reference: in the first run its log-probabilities would come from larger passes, with other rounding errors
    small = {"reward_weights.found": 1.0, "groups_per_step": 2, "steps": 2, "algorithm": "dr-grpo"}
    record = train(
        small_taskset(), seed, (patch.object(forward_backward, "_micro_batch_pass", scarce), *patches), **small
    )
    broken = list(record.violations_if(completed=True))
    warnings = [line for line in record.warnings if line.startswith("memory:")]
    if len(warnings) != 1:
        broken.append(f"{len(warnings)} warnings about memory instead of one")
    else:
        tokens = int(warnings[0].split(" tokens")[0].split()[-1])
        smaller = train(small_taskset(), seed, **small, **{"trainer.micro_tokens": tokens})
        if smaller.checksums[1:] != record.checksums[1:]:
            broken.append("the weights differ from those of an update with smaller passes")
    return Outcome(fired["passes"], tuple(broken))


PASS = forward_backward._micro_batch_pass


def _forgetful(run: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Return a patch with which retries keep the gradients of the failed pass."""
    return patch.object(
        forward_backward.TokenBudget,
        "run",
        lambda budget, work, sequences, undo: run(budget, work, sequences, lambda: None),
    )


UNCHECKED_WEIGHTS = patch.object(health_monitor, "check_weights", lambda served, published: None)
UNCLEARED_GRADIENTS = _forgetful(forward_backward.TokenBudget.run)

NUMBERS: tuple[Case, ...] = (
    case(
        "T15",
        "the engine's log-probabilities are wrong by 0.05",
        "a warning, then stopped at the third consecutive step",
        shifted_logprobs,
        200,
        1,
        control("no limit", CONTINUED, shifted_logprobs, **{"monitor.logprob_gap": 1e9}),
        control("no difference", CONTINUED, shifted_logprobs, by=0.0),
    ),
    case(
        "T17",
        "a gradient is not finite from the second step on",
        "steps skipped, weights unchanged bit for bit, stopped after three",
        spoiled_gradients,
        20,
        4,
        control("unlimited patience", CONTINUED, spoiled_gradients, **{"monitor.patience": 99}),
    ),
    case(
        "T20",
        "new weights do not reach the engine, all or one tensor",
        "stopped at once",
        undelivered_weights,
        10,
        2,
        control("the engine's weights are not checked", CONTINUED, undelivered_weights, patches=(UNCHECKED_WEIGHTS,)),
    ),
    case(
        "memory",
        "a pass runs out of memory",
        "repeated with half the size, same weights, one warning",
        out_of_memory,
        10,
        1,
        control(
            "old gradients are not cleared", "the weights differ from", out_of_memory, patches=(UNCLEARED_GRADIENTS,)
        ),
    ),
)

"""Numbers that go wrong: groups, probabilities, gradients, weights, memory (T12, T15, T17, T20, and no memory)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from case import Case, Outcome
from hostile import RUN, WENT_ON, Ran, case, control, ran, small_taskset

from agent_r1.core.errors import RunStopped
from agent_r1.core.inference import Completion, Prompt, SamplingParams
from agent_r1.core.trajectory import Group, Trajectory
from agent_r1.core.weights import Weights
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.rollout.collector import Collector
from agent_r1.trainer import forward_backward as passes
from agent_r1.trainer import oom_retry as memory
from agent_r1.trainer.learner import NOT_FINITE
from agent_r1.training import run
from agent_r1.training.monitor import health_monitor as doctor


def stopped_by(left: Ran, check: str) -> list[str]:
    """What is wrong with a run that this check had to stop."""
    broken = list(left.unsound(completed=False))
    if left.error is not None and not (isinstance(left.error, RunStopped) and f"{check}:" in str(left.error)):
        broken.append(f"it was not {check} that stopped it but: {left.error}")
    return broken


def _renamed(trajectory: Trajectory, **changes: Any) -> Trajectory:
    return replace(trajectory, attempt=replace(trajectory.attempt, **changes))


TEARS: tuple[Callable[[Group], Group], ...] = (
    lambda group: replace(group, trajectories=group.trajectories[1:]),
    lambda group: replace(group, trajectories=(group.trajectories[0], *group.trajectories[:-1])),
    lambda group: replace(group, trajectories=group.trajectories[::-1]),
    lambda group: replace(group, group_id=group.group_id + 1),
    lambda group: replace(group, trajectories=tuple(_renamed(t, group_id=0) for t in group.trajectories)),
    lambda group: replace(group, trajectories=tuple(_renamed(t, task="another") for t in group.trajectories)),
    lambda group: replace(group, trajectories=(_renamed(group.trajectories[0], run="other"), *group.trajectories[1:])),
    lambda group: replace(group, greedy=_renamed(group.trajectories[0], sample_index=len(group.trajectories))),
    lambda group: replace(group, retried=(group.trajectories[0],)),
    lambda group: replace(group, trajectories=(_renamed(group.trajectories[0], retry=1), *group.trajectories[1:])),
)


def torn_groups(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """The sixth group, in the middle of the second step, is handed over torn."""
    fired = Counter[str]()

    class Tearing(Collector):
        async def _group(self, order: Any, version: int) -> Group:
            group = await super()._group(order, version)
            if self._run != RUN or order.group_id != 5:
                return group
            fired["groups"] += 1
            return TEARS[seed % len(TEARS)](group)

    left = ran(small_taskset(), seed, (patch.object(run, "Collector", Tearing), *patches))
    broken = stopped_by(left, "group")
    if len(left.metrics) != 1 and left.error is not None:
        broken.append(f"{len(left.metrics)} steps were taken where the second had to be stopped")
    return Outcome(fired["groups"], tuple(broken))


def shifted_logprobs(seed: int, by: float = 0.05, **settings: Any) -> Outcome:
    """The engine's log-probabilities are a little off, as those of another temperature or kernel are."""
    fired = Counter[str]()

    class Shifted(TorchEngine):
        async def generate(
            self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None
        ) -> Completion:
            said = await super().generate(prompt, params, session_id=session_id)
            fired["generations"] += (session_id or "").startswith(f"{RUN}:")
            return replace(said, logprobs=tuple(logprob - by for logprob in said.logprobs))

    left = ran(small_taskset(), seed, (patch.object(run, "TorchEngine", Shifted),), steps=6, **settings)
    broken = stopped_by(left, "logprob_gap")
    if left.error is not None and (len(left.warnings), len(left.metrics)) != (3, 3):
        broken.append(f"{len(left.warnings)} warnings in {len(left.metrics)} steps, where three were to come in three")
    return Outcome(fired["generations"], tuple(broken))


def unsteady_learner(seed: int, **settings: Any) -> Outcome:
    """The learner's own probabilities differ from pass to pass, as dropout makes them."""
    fired = Counter[str]()
    generator = torch.Generator().manual_seed(seed)

    def shaken(*arguments: Any) -> torch.Tensor:
        fired["passes"] += 1
        states = UNSHAKEN(*arguments)
        return states + 0.01 * torch.randn(states.shape, generator=generator)

    bounds = {"trainer.minibatches": 2, "monitor.logprob_gap": 1e9, "steps": 6}
    left = ran(small_taskset(), seed, (patch.object(passes, "hidden_states", shaken),), **{**bounds, **settings})
    return Outcome(fired["passes"], tuple(stopped_by(left, "first_ratio_deviation")))


UNSHAKEN = passes.hidden_states


def spoiled_gradients(seed: int, **settings: Any) -> Outcome:
    """From the second step on, a loss of an update is not a number, or infinite."""
    fired, updates = Counter[str](), itertools.count(1)
    spoil = (float("nan"), float("inf"))[seed % 2]

    def learned(*arguments: Any) -> passes.PassStats:
        seen = LEARN(*arguments)
        if next(updates) == 1:
            return seen
        fired["updates"] += 1
        for parameter in itertools.islice(arguments[0].policy.parameters(), 1):
            parameter.grad.view(-1)[0] = spoil
        return seen

    left = ran(small_taskset(), seed, (patch("agent_r1.trainer.learner.learn", learned),), steps=6, **settings)
    broken = stopped_by(left, "skipped_steps")
    if left.error is not None and (len(left.digests), len(left.metrics)) != (2, 4):
        broken.append(f"{len(left.digests)} versions in {len(left.metrics)} steps, where two were to be made in four")
    late = [fate for fate in left.fates.values() if fate.step > 1]
    if not late or {fate.reason for fate in late} != {NOT_FINITE}:
        broken.append("attempts of refused steps do not have that reason")
    return Outcome(fired["updates"], tuple(broken))


LEARN = passes.forward_backward


def undelivered_weights(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """From the second step on the engine keeps older weights, in all tensors or in one, and says it took the new."""
    fired = Counter[str]()

    class Keeping(TorchEngine):
        def _replace(self, weights: Weights) -> None:
            model, stale = self._decoder.model, {}
            if weights.version > 1:
                fired["loads"] += 1
                stale = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            super()._replace(weights)
            names = list(stale)[-1:] if seed % 2 else list(stale)
            model.load_state_dict({name: stale[name] for name in names}, strict=False)

    left = ran(small_taskset(), seed, (patch.object(run, "TorchEngine", Keeping), *patches))
    broken = stopped_by(left, "weights")
    if left.error is not None and len(left.metrics) != 2:
        broken.append(f"{len(left.metrics)} steps were taken, where the second had to be the last")
    return Outcome(fired["loads"], tuple(broken))


def out_of_memory(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """Passes of more than so many tokens run out of memory, late: gradients of a part of the batch are there."""
    fired = Counter[str]()

    def scarce(*arguments: Any) -> passes.PassStats:
        seen = PASS(*arguments)
        if seen.padded > SCARCE:
            fired["passes"] += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {seen.padded} KiB")
        return seen

    small = {"reward_weights.found": 1.0, "groups_per_step": 2, "steps": 2}
    left = ran(small_taskset(), seed, (patch.object(passes, "_learn", scarce), *patches), **small)
    broken = list(left.unsound(completed=True))
    told = [line for line in left.warnings if line.startswith("memory:")]
    if len(told) != 1:
        broken.append(f"{len(told)} warnings of memory, where it ran out once")
    else:
        tokens = int(told[0].split("(")[1].split()[0])
        smaller = ran(small_taskset(), seed, **small, **{"trainer.micro_tokens": tokens})
        if smaller.digests[1:] != left.digests[1:]:
            broken.append("weights are not those of an update in smaller passes from the beginning")
    return Outcome(fired["passes"], tuple(broken))


PASS = passes._learn
SCARCE = 300
"""Tokens that fit."""


def _forgetful(spend: Callable[..., Any]) -> AbstractContextManager[Any]:
    """A budget that begins again without clearing what was left behind."""
    return patch.object(
        memory.TokenBudget, "spend", lambda budget, work, sequences, undo: spend(budget, work, sequences, lambda: None)
    )


UNASKED = patch.object(doctor, "same_weights", lambda held, made: None)
UNSEEN = patch.object(doctor, "torn", lambda group, serial, size, greedy: None)
FORGETFUL = _forgetful(memory.TokenBudget.spend)

NUMBERS: tuple[Case, ...] = (
    case(
        "T12",
        "a group with an attempt lost, doubled, swapped, or of another group",
        "stopped before it is learned from",
        torn_groups,
        2 * len(TEARS),
        len(TEARS),
        control("groups taken as they are", WENT_ON, torn_groups, patches=(UNSEEN,)),
    ),
    case(
        "T15a",
        "the engine's log-probabilities are 0.05 off",
        "warned of, stopped at the third step in a row",
        shifted_logprobs,
        200,
        1,
        control("no bound", WENT_ON, shifted_logprobs, **{"monitor.logprob_gap": 1e9}),
        control("nothing off", WENT_ON, shifted_logprobs, by=0.0),
    ),
    case(
        "T15b",
        "the learner's probabilities differ from pass to pass",
        "warned of, stopped",
        unsteady_learner,
        100,
        1,
        control("no bound", WENT_ON, unsteady_learner, **{"monitor.ratio_deviation": 1e9}),
    ),
    case(
        "T17",
        "a gradient is not finite from the second step on",
        "steps refused, weights unchanged bit for bit, stopped after three",
        spoiled_gradients,
        20,
        4,
        control("patience without end", WENT_ON, spoiled_gradients, **{"monitor.patience": 99}),
    ),
    case(
        "T20",
        "new weights do not reach the engine, all or one tensor",
        "stopped at once",
        undelivered_weights,
        10,
        2,
        control("nobody asks the engine", WENT_ON, undelivered_weights, patches=(UNASKED,)),
    ),
    case(
        "memory",
        "a pass runs out of memory",
        "begun again in halves, same weights, one warning",
        out_of_memory,
        10,
        1,
        control("gradients left behind are not cleared", "weights are not those", out_of_memory, patches=(FORGETFUL,)),
    ),
)

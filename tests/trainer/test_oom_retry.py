"""Where memory runs out an update is begun again in smaller passes, and comes out the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.trajectory import Status
from agent_r1.data.sequences import TurnPlace, TokenSequence, pack_per_turn, pack_prefix_tree, within
from agent_r1.trainer import forward_backward as passes
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.learner import Learner, Update
from agent_r1.trainer.oom_retry import Budget, OutOfMemory
from agent_r1.trainer.optimizer import Optimizer

RAN_OUT = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


def blocks(*lengths: int) -> list[tuple[TokenSequence, ...]]:
    nothing = torch.zeros(0, dtype=torch.int64)
    return [
        (TokenSequence(0, torch.zeros(n), nothing, nothing, nothing, nothing, nothing, nothing, False),)
        for n in lengths
    ]


@pytest.mark.parametrize("error", RAN_OUT, ids=lambda error: type(error).__name__)
def test_work_is_begun_again_with_half_of_what_it_held(error: Exception) -> None:
    budget, tried, undone = Budget(1000), list[int](), list[int]()

    def work(tokens: int) -> str:
        tried.append(tokens)
        if tokens > 100:
            raise error
        return "done"

    assert budget.spend(work, blocks(100, 100), lambda: undone.append(1)) == "done"
    assert (tried, budget.tokens, undone) == ([1000, 100], 100, [1])  # it held 200, not 1000
    assert budget.spend(work, blocks(100, 100), lambda: undone.append(1)) == "done"
    assert tried == [1000, 100, 100]


def test_passes_are_halved_until_they_fit_or_hold_one_block() -> None:
    tried = list[int]()

    def work(tokens: int) -> str:
        tried.append(tokens)
        if tokens > 400:
            raise RAN_OUT[0]
        return "done"

    budget = Budget(4096)
    assert budget.spend(work, blocks(*[132] * 20), lambda: None) == "done"
    assert tried == [4096, 1320, 660, 330] and budget.tokens == 330
    together = [tuple(sequence for (sequence,) in blocks(*[100] * 5))]  # one trajectory, which is never divided
    with pytest.raises(OutOfMemory, match="alone has 500: CUDA out of memory"):
        Budget(4096).spend(lambda tokens: work(401), together, lambda: None)


def test_memory_that_runs_out_beside_the_passes_is_told_with_sizes(make: Any) -> None:
    learner = Learner(make.model(), build_algorithm("grpo", {}), TrainerConfig(), temperature=1.0, reward_weights={}, seed=0)

    def step(*_: object) -> None:
        raise RAN_OUT[0]

    with (
        patch.object(Optimizer, "step", step),
        pytest.raises(OutOfMemory, match=r"an update on \d+ attempts, in passes of 16384 tokens: CUDA out of memory"),
    ):
        learner.update(make.random_groups(0))


def test_what_does_not_fit_in_halves_either_is_refused_with_numbers() -> None:
    def work(tokens: int) -> None:
        raise RAN_OUT[0]

    with pytest.raises(OutOfMemory, match=r"passes of 100 tokens, the longest sequence alone has 100: CUDA out"):
        Budget(1000).spend(work, blocks(100, 100), lambda: None)


def test_other_errors_are_no_matter_of_memory() -> None:
    def work(tokens: int) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        Budget(1000).spend(work, blocks(60), lambda: None)


def updated(make: Any, scarce: int | None, **config: Any) -> Update:
    """An update whose passes of more than ``scarce`` tokens run out of memory after their backward pass."""
    model = make.model()
    learner = Learner(
        model,
        build_algorithm("ppo", {"epochs": 2}),
        TrainerConfig(learning_rate=1e-2, critic_learning_rate=1e-2, minibatches=2, **config),
        temperature=0.7,
        reward_weights={},
        seed=0,
    )

    def short(*arguments: Any) -> passes.Pass:
        seen = one_pass(*arguments)
        if scarce is not None and seen.padded > scarce:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return seen

    one_pass = passes._learn
    with patch.object(passes, "_learn", short):
        update = learner.update(make.random_groups(0))
    return update


def test_an_update_that_ran_out_of_memory_is_that_of_smaller_passes(make: Any) -> None:
    halved = updated(make, scarce=30, micro_tokens=100)
    assert halved.micro_tokens <= 50
    spared = updated(make, scarce=None, micro_tokens=100)
    assert spared.micro_tokens == 100
    for name, value in spared.metrics.items():
        if name != "padding":
            assert halved.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert halved.fates == spared.fates
    with patch.object(Budget, "spend", lambda budget, work, of, undo: spend(budget, work, of, lambda: None)):
        torn = updated(make, scarce=30, micro_tokens=100)  # control: gradients of the first try are left in
    assert torn.metrics["policy_gradient_norm"] != pytest.approx(spared.metrics["policy_gradient_norm"], rel=1e-3)


spend = Budget.spend


def test_a_tree_that_is_too_long_is_learned_from_path_by_path(make: Any) -> None:
    turns = [make.turn(0, [1, 2, 3], [4]), make.turn(1, [5], [6, 7], parent=0), make.turn(2, [8], [9], parent=0)]
    trajectory, places = make.trajectory(turns), [TurnPlace(0, 0), TurnPlace(1, 1), TurnPlace(2, 3)]
    fits, split = within(pack_prefix_tree, lambda: 9), within(pack_prefix_tree, lambda: 8)
    assert [len(sequence) for sequence in fits(trajectory, 0, places)] == [9]
    assert [len(sequence) for sequence in split(trajectory, 0, places)] == [4, 7, 6]
    wanted = pack_per_turn(trajectory, 0, places)
    assert [one.ids.tolist() for one in split(trajectory, 0, places)] == [one.ids.tolist() for one in wanted]
    chain = make.trajectory(turns[:2])  # nothing would be shorter by path
    assert [len(sequence) for sequence in split(chain, 0, places[:2])] == [7]


def test_attempts_in_whose_place_another_came_are_dropped_with_what_ended_them(make: Any) -> None:
    groups = make.random_groups(0)
    lost = groups[0].trajectories[0]
    failed = replace(lost, status=Status.ENVIRONMENT_FAILED, reason="OSError: gone")
    again = replace(lost, attempt=replace(lost.attempt, retry=1))
    groups[0] = replace(groups[0], trajectories=(again, *groups[0].trajectories[1:]), retried=(failed,))
    update = Learner(
        make.model(), build_algorithm("grpo", {}), TrainerConfig(), temperature=1.0, reward_weights={}, seed=0
    ).update(groups)
    fates = {fate.attempt: fate for fate in update.fates}
    assert len(fates) == len(update.fates) == sum(len(group.trajectories) for group in groups) + 1
    assert fates[lost.attempt].reason == "tried again after environment_failed: OSError: gone"

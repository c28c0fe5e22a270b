"""If memory runs out, an update is repeated in smaller passes and gives the same result."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from extras import needs_gpu
from transformers import LlamaConfig, LlamaForCausalLM
from updating import make_updater, update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.data.sequences import TurnPlace, pack_per_turn, pack_prefix_tree, with_length_limit
from agent_r1.trainer import forward_backward as passes
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.forward_backward import OutOfMemory, TokenBudget
from agent_r1.trainer.optimizer import Optimizer
from agent_r1.trainer.protocol import PassStats
from agent_r1.trainer.updater import PolicyUpdater, UpdateReport

OOM_ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


def largest_of(count: int, length: int, at_least: int = 1) -> Callable[[int], int]:
    """Return the size of the largest micro-batch of ``count`` sequences, of which ``at_least`` belong together."""
    return lambda tokens: length * max(at_least, min(count, tokens // length))


@pytest.mark.parametrize("error", OOM_ERRORS, ids=lambda error: type(error).__name__)
def test_a_pass_is_repeated_with_half_of_its_largest_micro_batch(error: Exception) -> None:
    budget, tried, undone = TokenBudget(1000), list[int](), list[int]()

    def work(tokens: int) -> str:
        tried.append(tokens)
        if tokens > 100:
            raise error
        return "done"

    assert budget.run(work, largest_of(2, 100), lambda: undone.append(1)) == "done"
    assert (tried, budget.tokens, undone) == ([1000, 100], 100, [1])  # the micro-batch had 200 tokens, not 1000
    assert budget.run(work, largest_of(2, 100), lambda: undone.append(1)) == "done"
    assert tried == [1000, 100, 100]


def test_micro_batches_are_halved_until_they_fit_or_hold_one_block() -> None:
    tried = list[int]()

    def work(tokens: int) -> str:
        tried.append(tokens)
        if tokens > 400:
            raise OOM_ERRORS[0]
        return "done"

    budget = TokenBudget(4096)
    assert budget.run(work, largest_of(20, 132), lambda: None) == "done"
    assert tried == [4096, 1320, 660, 330] and budget.tokens == 330
    with pytest.raises(RuntimeError, match="invalid for input"):  # control: another error is raised as it is
        TokenBudget(4096).run(lambda tokens: torch.ones(2).reshape(3), largest_of(1, 60), lambda: None)
    together = largest_of(5, 100, at_least=5)  # one trajectory, which is never divided
    with pytest.raises(OutOfMemory, match="alone has 500: CUDA out of memory"):
        TokenBudget(4096).run(lambda tokens: work(401), together, lambda: None)


def test_running_out_of_memory_outside_the_passes_is_reported_with_sizes(make: Any) -> None:
    def step(*_: object) -> None:
        raise OOM_ERRORS[0]

    with (
        patch.object(Optimizer, "step", step),
        pytest.raises(OutOfMemory, match=r"an update on \d+ attempts, in passes of 16384 tokens: CUDA out of memory"),
    ):
        update(make_updater(make.model()), make.random_groups(0))


def update_within(make: Any, limit: int | None, micro_tokens: int) -> UpdateReport:
    """Return an update in which memory runs out after each backward pass of more than ``limit`` tokens."""
    algorithm = build_algorithm("ppo", {"epochs": 2})
    rates = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2}
    updater = make_updater(make.model(), algorithm, temperature=0.7, minibatches=2, micro_tokens=micro_tokens, **rates)
    one_pass = passes._micro_batch_pass

    def limited_pass(*arguments: Any) -> PassStats:
        stats = one_pass(*arguments)
        if limit is not None and stats.num_padded_tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stats

    with patch.object(passes, "_micro_batch_pass", limited_pass):
        return update(updater, make.random_groups(0))


def test_an_update_that_ran_out_of_memory_equals_one_in_smaller_passes(make: Any) -> None:
    halved = update_within(make, limit=30, micro_tokens=100)
    assert halved.micro_tokens <= 50
    whole = update_within(make, limit=None, micro_tokens=100)
    assert whole.micro_tokens == 100
    for name, value in whole.metrics.items():
        if name != "padding":
            assert halved.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert halved.outcomes == whole.outcomes

    def run_without_undo(
        budget: TokenBudget, work: Callable[[int], Any], largest: Callable[[int], int], undo: Callable[[], None]
    ) -> Any:
        return run(budget, work, largest, lambda: None)

    run = TokenBudget.run
    with patch.object(TokenBudget, "run", run_without_undo):  # control: the gradients of the first try are kept
        wrong = update_within(make, limit=30, micro_tokens=100)
    assert wrong.metrics["policy_gradient_norm"] != pytest.approx(whole.metrics["policy_gradient_norm"], rel=1e-3)


def test_a_tree_above_the_limit_is_divided_into_one_sequence_per_turn(make: Any) -> None:
    turns = [make.turn(0, [1, 2, 3], [4]), make.turn(1, [5], [6, 7], parent=0), make.turn(2, [8], [9], parent=0)]
    trajectory, places = make.trajectory(turns), [TurnPlace(0, 0), TurnPlace(1, 1), TurnPlace(2, 3)]
    fits, split = with_length_limit(pack_prefix_tree, lambda: 9), with_length_limit(pack_prefix_tree, lambda: 8)
    assert [len(sequence) for sequence in fits(trajectory, 0, places)] == [9]
    assert [len(sequence) for sequence in split(trajectory, 0, places)] == [4, 7, 6]
    expected = pack_per_turn(trajectory, 0, places)
    assert [one.ids.tolist() for one in split(trajectory, 0, places)] == [one.ids.tolist() for one in expected]
    chain = make.trajectory(turns[:2])  # without branches, division would not make it shorter
    assert [len(sequence) for sequence in split(chain, 0, places[:2])] == [7]


@needs_gpu
def test_a_pass_that_runs_out_of_gpu_memory_is_repeated(make: Any) -> None:
    groups = make.random_groups(0, groups=16, members=16, turns=8)

    def updater() -> PolicyUpdater:
        torch.manual_seed(0)
        gc.collect()  # an updater refers to itself
        torch.cuda.empty_cache()
        sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4}
        return make_updater(LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).to("cuda"))

    torch.cuda.reset_peak_memory_stats()
    expected = update(updater(), groups)
    peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    limited = updater()
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((held + 0.5 * (peak - held)) / total)
    try:
        found = update(limited, groups)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert limited.micro_tokens < TrainerConfig().micro_tokens
    assert found.metrics["policy_loss"] == pytest.approx(expected.metrics["policy_loss"], rel=1e-3, abs=1e-5)
    assert found.metrics["policy_gradient_norm"] == pytest.approx(expected.metrics["policy_gradient_norm"], rel=1e-3)

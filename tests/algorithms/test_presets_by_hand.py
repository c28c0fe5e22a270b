"""Each algorithm gives the advantages and the loss that were computed by hand from its paper's formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hand_cases import critics, groups, returns, turns
from hand_cases.case import (
    ENTROPY,
    GREEDY,
    KL_COEFFICIENT,
    OBSERVED_PI,
    OLD,
    OLD_VALUES,
    PI,
    PI_TOP,
    REFERENCE,
    TEACHER,
    TEACHER_TOP,
    VALUES,
    Case,
)
from tensors import close, numbers
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs, StateValues, TokenOutputs, TokenWeights
from agent_r1.core.messages import Message, Text, ToolResult
from agent_r1.data.batch import TrainingBatch, assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree

CASES = (*groups.CASES, *turns.CASES, *returns.CASES, *critics.CASES)
CLOSE = 1e-5
"""The cases have six digits, and neglect the epsilon that is added to a standard deviation."""

OPENING, OTHER = Message.user("Where?"), Message.user("Elsewhere?")


def make_batch(make: Any, algorithm: Algorithm) -> TrainingBatch:
    """Return the batch of case.py."""
    log_old = numbers(*OLD).log().tolist()
    tool_result = {"results": (ToolResult((Text("here"),), ok=True),)}
    attempts = (
        (
            make.turn(
                0, [1], [2, 3], logprobs=log_old[:2], observation=(OPENING,), **tool_result,
                call_rewards=({"tool": 0.5},), call_ends=(0,),
            ),
            make.turn(1, [4], [5], parent=0, logprobs=log_old[2:3]),
        ),
        (
            make.turn(0, [1], [6], logprobs=log_old[3:4], observation=(OTHER,), **tool_result),
            make.turn(1, [4, 4], [7], parent=0, logprobs=log_old[4:5]),
        ),
        (make.turn(0, [1], [8], logprobs=log_old[5:6]),),
        (make.turn(0, [1], [9], logprobs=log_old[6:7]),),
        (make.turn(0, [1], [10, 11], logprobs=log_old[7:]),),
    )  # fmt: skip
    scores, group = (0.5, 0.0, 0.2, 3.0, 1.0), (0, 0, 0, 1, 1)
    trajectories = [
        make.trajectory(turns, {"score": scores[member]}, group=group[member], member=member, start=[OPENING])
        for member, turns in enumerate(attempts)
    ]
    greedy = {
        group_id: make.trajectory(attempts[2], {"score": score}, group=group_id, member=9)
        for group_id, score in GREEDY.items()
    }
    return assemble_batch(
        select_trainable(make.groups(*trajectories, greedy=greedy), {}).samples, pack_prefix_tree, algorithm.token_scope
    )


def column(batch: TrainingBatch, actions: Sequence[float], observed: Sequence[float] = ()) -> Tensor:
    """Return a column (N,) with numbers of the action tokens and of the observed tokens (0 by default)."""
    found = torch.zeros(len(batch.ids), dtype=torch.float64)
    found[batch.action_mask] = numbers(*actions)
    if observed and not batch.action_mask.all():
        found[~batch.action_mask] = numbers(*observed)
    return found


def weights_and_loss(make: Any, algorithm: Algorithm) -> tuple[TrainingBatch, TokenWeights, Tensor]:
    batch = make_batch(make, algorithm)
    logprobs = column(batch, PI, OBSERVED_PI).log()
    reference = column(batch, REFERENCE, OBSERVED_PI).log()
    after_action = torch.zeros(7, dtype=torch.float64)
    old_values = StateValues(column(batch, OLD_VALUES), after_action)
    teacher = column(batch, TEACHER, OBSERVED_PI).log()
    teacher_top = numbers(*TEACHER_TOP).log().expand(len(batch.ids), 2)
    top = torch.zeros_like(teacher_top)
    top[batch.action_mask] = torch.tensor(PI_TOP, dtype=torch.float64).log()
    before = logprobs if algorithm.corrects_mismatch else None
    outputs = ModelOutputs(before, old_values, reference, teacher, column(batch, ENTROPY))
    weights = algorithm.compute_token_weights(batch, outputs, KL_COEFFICIENT)
    tokens = TokenOutputs(
        logprobs=logprobs.clone().requires_grad_(),
        entropy=torch.zeros_like(logprobs),
        old_logprobs=column(batch, OLD, OBSERVED_PI).log(),
        ratio_unit=algorithm.ratio_unit(batch),
        reference_logprobs=reference,
        values=StateValues(column(batch, VALUES), after_action) if "critic" in algorithm.needs else None,
        old_values=old_values,
        sampler_logprobs=column(batch, OLD, OBSERVED_PI).log(),
        trajectory=batch.token_trajectory,
        turn=batch.token_turn,
        top_logprobs=top,
        teacher_top_logprobs=teacher_top,
    )
    return batch, weights, algorithm.compute_loss(tokens, weights)[0].detach()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.algorithm} {dict(case.settings) or ''}")
def test_advantages_and_loss_equal_those_computed_by_hand(case: Case, make: Any) -> None:
    batch, weights, loss = weights_and_loss(make, build_algorithm(case.algorithm, case.settings))
    assert weights.advantage[batch.action_mask].tolist() == pytest.approx(case.advantage, abs=CLOSE)
    assert loss.item() == pytest.approx(case.loss, rel=CLOSE, abs=1e-6)


def test_every_preset_has_a_case() -> None:
    assert {case.algorithm for case in CASES} == set(ALGORITHMS)


def test_every_two_presets_differ_on_this_batch(make: Any) -> None:
    # control: a case that another algorithm would pass too shows little
    found = {name: weights_and_loss(make, algorithm)[1:] for name, algorithm in ALGORITHMS.items()}
    for name, (weights, loss) in found.items():
        for other, (other_weights, other_loss) in found.items():
            equal = len(weights.advantage) == len(other_weights.advantage) and close(
                weights.advantage, other_weights.advantage, 1e-5
            )
            assert name == other or not (equal and close(loss, other_loss, 1e-5)), (name, other)


@pytest.mark.parametrize(
    "wrong",
    [{"advantage.scale": "batch_std"}, {"loss.clip_high": 0.28}, {"aggregation": "trajectory_mean"}],
)
def test_an_algorithm_with_a_wrong_component_is_detected(wrong: dict[str, object], make: Any) -> None:
    # control: grpo with one change fails grpo's case
    _, weights, loss = weights_and_loss(make, build_algorithm("grpo", wrong))
    case = groups.CASES[0]
    same = weights.advantage.tolist() == pytest.approx(case.advantage, abs=CLOSE)
    assert case.algorithm == "grpo" and not (same and loss.item() == pytest.approx(case.loss, rel=CLOSE, abs=1e-6))


def test_the_batch_is_that_of_the_drawing(make: Any) -> None:
    batch = make_batch(make, ALGORITHMS["grpo"])
    assert batch.token_trajectory.tolist() == [0, 0, 0, 1, 1, 2, 3, 4, 4]
    assert batch.token_turn.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 6]
    assert batch.token_rewards.tolist() == [0.5, 0, 0.5, 0, 0, 0.2, 3, 0, 1]
    states = batch.turn_state_ids.tolist()
    assert states[0] == states[1] == states[2] == states[4] != states[3] and states[5] == states[6]
    assert batch.returns.tolist() == pytest.approx([1, 0, 0.2, 3, 1])

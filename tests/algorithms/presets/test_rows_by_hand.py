"""Each algorithm gives the advantages and the loss that were computed by hand from its paper's formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_cases import critics, groups, returns, turns
from hand_cases.case import (
    GREEDY,
    KL_COEFFICIENT,
    OBSERVED_PI,
    OLD,
    OLD_VALUES,
    PI,
    REFERENCE,
    TEACHER,
    VALUES,
    Case,
)
from tensors import close, numbers
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_row
from agent_r1.algorithms.signals import TokenWeights, CriticView, ModelOutputs, TokenOutputs
from agent_r1.core.messages import Message, Text
from agent_r1.core.tool import ToolResult
from agent_r1.data.assemble import assemble
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import select_trainable

CASES = (*groups.CASES, *turns.CASES, *returns.CASES, *critics.CASES)
CLOSE = 1e-5
"""Six digits were written down, and what is added to a standard deviation was not."""

OPENING, OTHER = Message.user("Where?"), Message.user("Elsewhere?")


def the_batch(make: Any, row: Algorithm) -> TrainingBatch:
    """The batch of case.py."""
    log_old = numbers(*OLD).log().tolist()
    answered = {"results": (ToolResult((Text("here"),), ok=True),)}
    attempts = (
        (
            make.turn(
                0, [1], [2, 3], logprobs=log_old[:2], observation=(OPENING,), **answered,
                call_rewards=({"tool": 0.5},), call_ends=(0,),
            ),
            make.turn(1, [4], [5], parent=0, logprobs=log_old[2:3]),
        ),
        (
            make.turn(0, [1], [6], logprobs=log_old[3:4], observation=(OTHER,), **answered),
            make.turn(1, [4, 4], [7], parent=0, logprobs=log_old[4:5]),
        ),
        (make.turn(0, [1], [8], logprobs=log_old[5:6]),),
        (make.turn(0, [1], [9], logprobs=log_old[6:7]),),
        (make.turn(0, [1], [10, 11], logprobs=log_old[7:]),),
    )  # fmt: skip
    scores, group = (0.5, 0.0, 0.2, 3.0, 1.0), (0, 0, 0, 1, 1)
    lived = [
        make.trajectory(turns, {"score": scores[member]}, group=group[member], member=member, start=[OPENING])
        for member, turns in enumerate(attempts)
    ]
    greedy = {
        serial: make.trajectory(attempts[2], {"score": earned}, group=serial, member=9)
        for serial, earned in GREEDY.items()
    }
    return assemble(select_trainable(make.groups(*lived, greedy=greedy), {}).samples, pack_prefix_tree, row.scope)


def column(batch: TrainingBatch, actions: Sequence[float], observed: Sequence[float] = ()) -> Tensor:
    """Numbers of the action tokens, and of those observed between them (0 if not given), where there are any."""
    found = torch.zeros(len(batch.ids), dtype=torch.float64)
    found[batch.chosen] = numbers(*actions)
    if observed and not batch.chosen.all():
        found[~batch.chosen] = numbers(*observed)
    return found


def credit_and_loss(make: Any, row: Algorithm) -> tuple[TrainingBatch, TokenWeights, Tensor]:
    batch = the_batch(make, row)
    logprobs = column(batch, PI, OBSERVED_PI).log()
    reference = column(batch, REFERENCE, OBSERVED_PI).log()
    values, ends = column(batch, OLD_VALUES), torch.zeros(7, dtype=torch.float64)
    teacher = column(batch, TEACHER, OBSERVED_PI).log()
    credit = row.credit(batch, ModelOutputs(None, values, ends, reference, teacher, KL_COEFFICIENT))
    view = TokenOutputs(
        logprobs=logprobs.requires_grad_(),
        entropy=torch.zeros_like(values),
        old=column(batch, OLD, OBSERVED_PI).log(),
        turn=batch.token_turn,
        trajectory=batch.token_trajectory,
        reference=reference,
        critic=CriticView(column(batch, VALUES), ends, values, ends) if "critic" in row.needs else None,
    )
    return batch, credit, row.loss(view, credit)[0].detach()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row} {dict(case.settings) or ''}")
def test_advantages_and_loss_are_those_computed_by_hand(case: Case, make: Any) -> None:
    batch, credit, loss = credit_and_loss(make, build_row(case.row, case.settings))
    assert credit.advantage[batch.chosen].tolist() == pytest.approx(case.advantage, abs=CLOSE)
    assert loss.item() == pytest.approx(case.loss, rel=CLOSE, abs=1e-6)


def test_every_row_has_a_case() -> None:
    assert {case.row for case in CASES} == set(ALGORITHMS)


def test_no_two_rows_are_the_same_to_this_batch(make: Any) -> None:
    # control: a case that another algorithm would pass too shows little
    found = {name: credit_and_loss(make, row)[1:] for name, row in ALGORITHMS.items()}
    for name, (credit, loss) in found.items():
        for other, (credit_there, loss_there) in found.items():
            alike = len(credit.advantage) == len(credit_there.advantage) and close(
                credit.advantage, credit_there.advantage, 1e-5
            )
            assert name == other or not (alike and close(loss, loss_there, 1e-5)), (name, other)


@pytest.mark.parametrize(
    "wrong",
    [
        {"advantage.baseline": "others"},
        {"advantage.scale": "batch"},
        {"surrogate.dual": None},
        {"surrogate.high": 0.28},
        {"aggregation": "trajectory_mean"},
        {"ratio": "turn"},
    ],
)
def test_a_row_with_a_wrong_part_is_seen(wrong: dict[str, object], make: Any) -> None:
    # control: grpo, with one thing changed, fails grpo's case
    _, credit, loss = credit_and_loss(make, build_row("grpo", wrong))
    case = groups.CASES[0]
    same = credit.advantage.tolist() == pytest.approx(case.advantage, abs=CLOSE)
    assert case.row == "grpo" and not (same and loss.item() == pytest.approx(case.loss, rel=CLOSE, abs=1e-6))


def test_the_batch_is_that_of_the_drawing(make: Any) -> None:
    batch = the_batch(make, ALGORITHMS["grpo"])
    assert batch.token_trajectory.tolist() == [0, 0, 0, 1, 1, 2, 3, 4, 4]
    assert batch.token_turn.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 6]
    assert batch.token_rewards.tolist() == [0.5, 0, 0.5, 0, 0, 0.2, 3, 0, 1]
    states = batch.turn_states.tolist()
    assert states[0] == states[1] == states[2] == states[4] != states[3] and states[5] == states[6]
    assert replace(batch, named=()).returns.tolist() == pytest.approx([1, 0, 0.2, 3, 1])

"""Advantages and losses of a user's own: what they may return, and what their errors print."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import agent_r1
from agent_r1 import Task, ToolEnv
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.policy_losses import PolicyLoss
from agent_r1.algorithms.types import Advantage
from agent_r1.core.errors import InvalidInput
from agent_r1.training.progress import SilentProgress

TASKS = [Task(str(n), f"Say {n}.") for n in range(2)]


def odd(trajectory: Any, task: Task) -> float:
    return float(trajectory.attempt.sample_index % 2)


class Ranked(Advantage):
    """The rank of the trajectory, in a data type of torch."""

    name: Literal["ranked"] = "ranked"
    formula = "rank"
    dtype: str = "float64"

    def compute(self, batch: Any, outputs: Any) -> Tensor:
        return torch.where(batch.returns > 0.5, 1, -1)[batch.token_trajectory].to(getattr(torch, self.dtype))


class Averaged(PolicyLoss):
    """A loss that forgets that each token has a loss of its own."""

    name: Literal["averaged"] = "averaged"
    formula = "mean"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: Any) -> Tensor:
        return -(ratio * advantage).mean()


def train(folder: Path, algorithm: Algorithm) -> agent_r1.TrainReport:
    settings: dict[str, Any] = {"steps": 1, "groups_per_step": 1, "group_size": 2, "max_tokens": 2, "evaluate_n": 1}
    env = ToolEnv(tools=[], rewards=[odd])
    return agent_r1.train(env, TASKS, algorithm=algorithm, run=str(folder), progress=SilentProgress(), **settings)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_an_advantage_may_have_any_type_of_number(tmp_path: Path, dtype: str) -> None:
    assert train(tmp_path / "run", Algorithm(name="mine", advantage=Ranked(dtype=dtype))).steps == 1


def test_an_error_in_an_advantage_is_one_line_with_its_place(tmp_path: Path) -> None:
    algorithm = Algorithm(name="mine", advantage=Ranked(dtype="float7"))
    place = r"\(test_own_algorithm.py:\d+, in compute\); fix this line"
    with pytest.raises(InvalidInput, match=f"algorithm mine: got AttributeError: .*float7.* {place}"):
        train(tmp_path / "run", algorithm)


def test_several_ranks_refuse_components_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranked, "__module__", "__main__")
    settings = {"algorithm": Algorithm(name="mine", advantage=Ranked()), "trainer": {"ranks": 2}}
    with pytest.raises(InvalidInput, match="got 2, and Ranked of __main__; define Ranked in a module of its own"):
        agent_r1.train(ToolEnv(tools=[], rewards=[odd]), TASKS, run=str(tmp_path / "run"), **settings)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_averaged_is_refused(tmp_path: Path) -> None:
    algorithm = Algorithm(name="mine", advantage=Ranked(), loss=Averaged())
    with pytest.raises(InvalidInput, match=r"loss averaged: got numbers of shape \(\); return one number per token"):
        train(tmp_path / "run", algorithm)

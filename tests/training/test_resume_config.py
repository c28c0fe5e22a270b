"""What a run is resumed with: what it has, of which little may change."""

import asyncio
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_r1.config import Layer, keys, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import StepMetrics
from agent_r1.store import Ledger, create_run, reopen_run
from agent_r1.training.config import TrainConfig
from agent_r1.training.resume import MAY_CHANGE, resumed

OWN = TrainConfig(
    model="tiny-base",
    algorithm="ppo",
    steps=7,
    data=Path("questions.json"),
    row={"epochs": 2},
    reward_weights={"f1": 0},
)

OTHER: dict[str, Any] = {
    "seed": 1,
    "task": "hotpotqa",
    "algorithm": "grpo",
    "row.epochs": 3,
    "row.refill": 1,
    "reward_weights.f1": 1.0,
    "reward_weights.em": 1.0,
    "trainer.learning_rate": 0.5,
    "trainer.betas": [0.5, 0.5],
    "group_size": 9,
    "max_staleness": 1,
    "evaluate_n": 3,
}


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., TrainConfig]:
    """``ask(seed=3)`` is what the run is resumed with where that is asked for."""
    create_run(tmp_path / "run", OWN.model_dump(mode="json")).close()

    def asking(**settings: Any) -> TrainConfig:
        return resumed([Layer("test", {"run": str(tmp_path / "run"), **settings})])

    return asking


def test_a_run_goes_on_with_what_it_has(ask: Callable[..., TrainConfig], tmp_path: Path) -> None:
    assert ask() == OWN.model_copy(update={"run": str(tmp_path / "run")})


def test_saying_what_it_has_anyway_is_no_change(ask: Callable[..., TrainConfig]) -> None:
    said = {"algorithm": "ppo", "steps": 7, "row.epochs": 2, "trainer.betas": [0.9, 0.95], "data": "questions.json"}
    assert ask(**said) == ask()


@pytest.mark.parametrize("key", OTHER)
def test_what_a_run_learns_from_may_not_change(key: str, ask: Callable[..., TrainConfig]) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(key)}: got .*; leave it out: .* goes on with"):
        ask(**{key: OTHER[key]})


MORE: dict[str, Any] = {
    "steps": 8,
    "checkpoint_every": 2,
    "checkpoint_keep": 3,
    "pass_k": 1,
    "splits": ("style-a", "paraphrased"),
    "pass_attempts": 2,
    "device": "cpu",
    "threads": 2,
    "concurrency": 2,
    "data": "/moved/questions.json",
    "corpus": "/moved/corpus.jsonl",
    "model": "/moved/model",
    "episode_seconds": 2.0,
    "score_seconds": 2.0,
    "trainer.micro_tokens": 512,
    "doctor.failure_share": 1.0,
    "doctor.failure_window": 8,
    "doctor.patience": 9,
    "doctor.idle_steps": 99,
    "doctor.ratio_deviation": 1.0,
    "doctor.logprob_gap": 1.0,
    "doctor.gradient_spike": 2.0,
}


def test_what_may_change_is_known_and_does(ask: Callable[..., TrainConfig]) -> None:
    assert {"run", *MORE} == set(MAY_CHANGE) <= set(keys(TrainConfig))
    assert ask(**MORE) == resolve(TrainConfig, [Layer("more", MORE), Layer("own", ask().model_dump(mode="json"))])


async def came_to(ledger: Ledger, step: int) -> None:
    await ledger.record(*(StepMetrics(taken, {"loss": 0.0}) for taken in range(1, step + 1)))


def test_steps_go_down_to_those_that_were_taken(ask: Callable[..., TrainConfig], tmp_path: Path) -> None:
    with closing(reopen_run(tmp_path / "run")) as ledger:
        asyncio.run(came_to(ledger, 5))
    assert ask(steps=5).steps == 5
    with pytest.raises(InvalidInput, match=r"^steps: got 4; give at least the 5 that .* took, or leave it out$"):
        ask(steps=4)


def test_a_key_that_nobody_knows_is_named(ask: Callable[..., TrainConfig]) -> None:
    with pytest.raises(InvalidInput, match="the nearest that exists is 'steps'"):
        ask(stepz=9)


def test_what_was_changed_once_stays_so(ask: Callable[..., TrainConfig], tmp_path: Path) -> None:
    with closing(reopen_run(tmp_path / "run")) as ledger:
        ledger.open_lineage(0, ask(steps=9).model_dump(mode="json"))
    assert ask().steps == 9

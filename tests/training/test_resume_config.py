"""The configuration of a resumed run: its own, of which few settings can change."""

import asyncio
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_r1.config import Layer, resolve, setting_keys
from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import StepMetrics
from agent_r1.store.folder import create_run, reopen_run
from agent_r1.store.writer import RunWriter
from agent_r1.training.config import TrainConfig
from agent_r1.training.resume import CHANGEABLE, resolve_resume_config

OWN = TrainConfig(
    model="tiny-base",
    algorithm={"name": "ppo", "epochs": 2},
    steps=7,
    evaluate_every=4,
    trainer={"schedule": {"warmup_steps": 3}},
    data=Path("questions.json"),
    reward_weights={"f1": 0},
)

OTHER: dict[str, Any] = {
    "seed": 1,
    "taskset": "hotpotqa",
    "algorithm": "grpo",
    "algorithm.epochs": 3,
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
    create_run(tmp_path / "run", OWN.model_dump(mode="json")).close()

    def asking(**settings: Any) -> TrainConfig:
        return resolve_resume_config([Layer("test", {"run": str(tmp_path / "run"), **settings})])

    return asking


def test_a_run_continues_with_its_own_settings(ask: Callable[..., TrainConfig], tmp_path: Path) -> None:
    assert ask() == OWN.model_copy(update={"run": str(tmp_path / "run")})


def test_its_own_settings_can_be_given_again(ask: Callable[..., TrainConfig]) -> None:
    settings = {
        "algorithm": "ppo",
        "steps": 7,
        "algorithm.epochs": 2,
        "trainer.betas": [0.9, 0.95],
        "data": "questions.json",
    }
    assert ask(**settings) == ask()


@pytest.mark.parametrize("key", OTHER)
def test_what_a_run_learns_from_cannot_change(key: str, ask: Callable[..., TrainConfig]) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(key)}: got .*; leave it out: .* continues with"):
        ask(**{key: OTHER[key]})


def test_a_run_keeps_more_steps_than_its_warmup_has(ask: Callable[..., TrainConfig]) -> None:
    assert ask(steps=4).steps == 4
    with pytest.raises(InvalidInput, match=r"^steps: got 3; give more steps, or a shorter warm-up"):
        ask(steps=3)


MORE: dict[str, Any] = {
    "steps": 8,
    "stop_after": 2,
    "checkpoint_every": 2,
    "checkpoint_keep": 3,
    "record_tokens": 0,
    "profile": 5,
    "track": ("tensorboard",),
    "pass_k": 1,
    "splits": ("style-a", "paraphrased"),
    "pass_attempts": 2,
    "device": "cpu",
    "tf32": True,
    "threads": 2,
    "concurrency": 2,
    "data": "/moved/questions.json",
    "corpus": "/moved/corpus.jsonl",
    "model": "/moved/model",
    "own_code": ("/moved/model",),
    "trainer.schedule.steps": 8,
    "episode_seconds": 2.0,
    "score_seconds": 2.0,
    "trainer.micro_tokens": 512,
    "engine.max_sequences": 8,
    "trainer.ranks": 2,
    "trainer.rank_restarts": 1,
    "engine.kv_cache_gib": 0.5,
    "environment.workers": ("http://127.0.0.1:9",),
    "environment.episodes": 3,
    "placement.launcher": "ray",
    "placement.address": "10.0.0.5:6379",
    "placement.host": "10.0.0.6",
    "placement.spread": True,
    "placement.cpus": 0.5,
    "engine.backend": "vllm",
    "engine.replicas": 2,
    "engine.vllm.python": "/opt/vllm/bin/python",
    "engine.vllm.arguments": "--swap-space 0",
    "engine.vllm.devices": ("1", "2"),
    "engine.vllm.weights_folder": "/moved/weights",
    "engine.vllm.start_seconds": 90.0,
    "engine.vllm.stall_seconds": 12.0,
    "monitor.failure_share": 1.0,
    "monitor.patience": 9,
    "monitor.true_reward": "em",
    "monitor.logprob_gap": 1.0,
}


def test_the_changeable_settings_exist_and_change(ask: Callable[..., TrainConfig]) -> None:
    others = {"run", "engine.vllm.urls", "engine.decode_step"}
    assert {*others, *MORE} == set(CHANGEABLE) <= set(setting_keys(TrainConfig))
    assert ask(**{"engine.decode_step": "torch"}).engine.decode_step == "torch"  # the others are of vLLM
    assert ask(**MORE) == resolve(TrainConfig, [Layer("more", MORE), Layer("own", ask().model_dump(mode="json"))])


def test_a_run_of_ray_continues_without_it_by_one_setting(tmp_path: Path) -> None:
    placed = {"launcher": "ray", "address": "10.0.0.5:6379", "host": "10.0.0.6", "cpus": 0.5}
    config = resolve(TrainConfig, [Layer("own", {**OWN.model_dump(mode="json"), "placement": placed})])
    create_run(tmp_path / "run", config.model_dump(mode="json")).close()
    given = {"run": str(tmp_path / "run")}
    assert resolve_resume_config([Layer("test", given)]).placement == config.placement
    resumed = resolve_resume_config([Layer("test", {**given, "placement.launcher": "processes"})])
    assert resumed.placement == OWN.placement


async def take_steps(writer: RunWriter, step: int) -> None:
    await writer.record(*(StepMetrics(taken, {"loss": 0.0}) for taken in range(1, step + 1)))


def test_steps_cannot_be_fewer_than_were_taken(ask: Callable[..., TrainConfig], tmp_path: Path) -> None:
    with closing(reopen_run(tmp_path / "run")) as writer:
        asyncio.run(take_steps(writer, 5))
    assert ask(steps=5).steps == 5
    with pytest.raises(InvalidInput, match=r"^steps: got 4; give at least the 5 that .* took, or leave it out$"):
        ask(steps=4)


def test_an_unknown_setting_is_refused(ask: Callable[..., TrainConfig]) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'steps'"):
        ask(stepz=9)


def test_a_change_is_kept_when_the_run_is_resumed_again(ask: Callable[..., TrainConfig], tmp_path: Path) -> None:
    with closing(reopen_run(tmp_path / "run")) as writer:
        writer.open_segment(0, ask(steps=9).model_dump(mode="json"))
    assert ask().steps == 9

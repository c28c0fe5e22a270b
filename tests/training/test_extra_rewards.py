"""Rewards that a run adds to its task set: recorded by name, weighted by step, and with weight 0 without any effect."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.model.value_head import build_value_model
from agent_r1.reward_models.config import RewardModelConfig
from agent_r1.reward_models.evaluation import evaluate_scores
from agent_r1.reward_models.network import HeadNetwork, RewardModel, save_reward_model
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import run_digest
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

SMALL = {"steps": 2, "groups_per_step": 2, "group_size": 4, "evaluate_n": 1, "pass_k": 0, "checkpoint_every": 0}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "rm"
    torch.manual_seed(0)
    model = build_value_model(load_model(str(TINY_BASE_FOLDER), torch.float32))
    torch.nn.init.normal_(model.head.weight)
    evaluation = evaluate_scores([0.2, 0.8], [False, True], ["a", "b"], {}, RewardModelConfig(out=folder))
    save_reward_model(
        folder,
        RewardModel(HeadNetwork(model), "trajectory", "outcome"),
        load_tokenizer(str(TINY_BASE_FOLDER)),
        RewardModelConfig(out=folder),
        ("run",),
        evaluation,
    )
    return folder


def test_the_description_of_a_reward_model_is_valid_json_although_an_area_is_not_defined(reward_model: Path) -> None:
    text = (reward_model / "reward_model.json").read_text("utf-8")
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["evaluation"]["model"]["within_tasks"] is None


@pytest.fixture(scope="module")
def run(micro: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def start(**settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("runs") / "run"
        layers = [Layer("test", {**SMALL, "run": str(folder), **settings}), Layer("recipe", micro.recipe)]
        train(resolve(TrainConfig, layers), micro, SilentProgress())
        return folder

    return start


FOUND = {"reward_weights.found": 1.0, "evaluate_every": 0}
"""Searches that find a page are rewarded, so that each step has a signal."""


@pytest.fixture(scope="module")
def extra(run: Any, reward_model: Path) -> Path:
    sources = {"extra_rewards.cost": "calls", "extra_rewards.grounded": "grounded"}
    weights = {"reward_weights.cost": -0.1, "reward_weights.grounded": 0.0, "reward_schedules.cost": "1:0,2:1"}
    model = {"extra_rewards.quality": str(reward_model), "reward_weights.quality": 0.5}
    folder: Path = run(**FOUND, **sources, **weights, **model)
    return folder


def digest(folder: Path) -> str:
    with closing(RunReader(folder)) as reader:
        return run_digest(reader)


def test_rewards_of_weight_0_change_no_bit_of_a_run(run: Any, reward_model: Path) -> None:
    sources = {"cost": "calls", "repeats": "repeated_calls", "grounded": "grounded", "quality": str(reward_model)}
    plain = run(**FOUND)
    with_rewards = run(**FOUND, extra_rewards=sources, **{f"reward_weights.{name}": 0.0 for name in sources})
    assert digest(plain) == digest(with_rewards)
    with closing(RunReader(with_rewards)) as reader:
        assert all(set(sources) < set(one.rewards) for one in reader.trajectories("train"))


def test_each_reward_is_recorded_by_name_and_summed_by_the_weight_of_its_step(extra: Path) -> None:
    with closing(RunReader(extra)) as reader:
        curves = {name: reader.curve(f"reward/{name}") for name in ("em", "found", "cost", "grounded", "quality")}
        total = reader.curve("reward")
        qualities = [one.rewards["quality"] for one in reader.trajectories("train")]
    assert all(isinstance(value, float) and 0 < value < 1 for value in qualities) and len(set(qualities)) > 1
    for step, factor in ((1, 0.0), (2, 1.0)):
        parts = [curves["em"][step], curves["found"][step], 0.5 * curves["quality"][step]]
        assert total[step] == pytest.approx(sum(parts) - 0.1 * factor * curves["cost"][step])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_rewards.cost": "callz"}, "did you mean 'calls'"),
        ({"extra_rewards.em": "calls"}, "the task set has a reward of this name"),
        ({"extra_rewards.quality": "missing.toml"}, "missing.toml"),
        ({"reward_weights.quality": 0.0}, "reward_weights"),
        ({"reward_schedules.em": "5"}, "STEP:FACTOR"),
        ({"reward_schedules.cost": "1:0,2:1"}, "reward_schedules"),
    ],
)
def test_a_reward_that_does_not_exist_is_refused_in_one_line(run: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        run(**settings)

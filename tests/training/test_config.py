"""What training can be set to."""

from typing import Any

import pytest

from agent_r1.config import Layer, from_text, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.envs import ToolEnv
from agent_r1.training.config import EvalConfig, TrainConfig, settle


def world(**recipe: Any) -> TaskSet:
    return TaskSet("demo", ToolEnv([]), lambda split: [], (), recipe=recipe)


def test_a_recipe_fills_what_nobody_set() -> None:
    layers = [from_text(TrainConfig, {"steps": "3"})]
    config = settle(TrainConfig, layers, world(model="tiny-base", steps=9, group_size=4))
    assert (config.model, config.steps, config.group_size) == ("tiny-base", 3, 4)


def test_an_evaluation_takes_its_part_of_a_recipe() -> None:
    recipe = {"model": "tiny-base", "max_tokens": 32, "trainer.learning_rate": 1e-3}
    assert settle(EvalConfig, [], world(**recipe)).max_tokens == 32


def test_a_mistake_in_a_recipe_is_named_at_both_doors() -> None:
    for door in (TrainConfig, EvalConfig):
        with pytest.raises(InvalidInput, match=r"recipe of demo\): got 'trainer.lr'; the nearest .* 'trainer.learning"):
            settle(door, [], world(**{"trainer.lr": 1e-3}))


def test_a_model_has_to_be_named() -> None:
    with pytest.raises(InvalidInput, match="model: got nothing; give --model"):
        settle(TrainConfig, [], world())


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}])
def test_cut_sampling_is_refused_in_training_with_the_reason(cut: dict[str, Any]) -> None:
    assert resolve(TrainConfig, [Layer("a.toml", {"top_p": 1.0, "top_k": 0})])
    with pytest.raises(InvalidInput, match="biases the ratio"):
        resolve(TrainConfig, [Layer("a.toml", cut)])


@pytest.mark.parametrize("key", ["steps", "groups_per_step", "group_size", "max_tokens", "temperature", "threads"])
def test_nothing_is_trained_with_zero_of_these(key: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{key} "):
        resolve(TrainConfig, [Layer("a.toml", {key: 0})])


def test_the_resolved_configuration_is_plain_json() -> None:
    config = TrainConfig(model="m")
    assert TrainConfig.model_validate_json(config.model_dump_json(), strict=True) == config

"""The settings of training and evaluation."""

from typing import Any

import pytest

from agent_r1.algorithms.advantages.groups import WhitenedGroup
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.config import Layer, from_text, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.training.config import EvalConfig, TrainConfig, resolve_config


def taskset(**recipe: Any) -> TaskSet:
    return TaskSet("demo", ToolEnv([]), lambda split: [], (), recipe=recipe)


def test_the_task_sets_defaults_apply_where_no_layer_does() -> None:
    layers = [from_text(TrainConfig, {"steps": "3"})]
    config = resolve_config(TrainConfig, layers, taskset(model="tiny-base", steps=9, group_size=4))
    assert (config.model, config.steps, config.group_size) == ("tiny-base", 3, 4)


def test_an_evaluation_takes_its_part_of_the_defaults() -> None:
    recipe = {"model": "tiny-base", "max_tokens": 32, "trainer.learning_rate": 1e-3}
    assert resolve_config(EvalConfig, [], taskset(**recipe)).max_tokens == 32


def test_a_mistake_in_the_defaults_is_reported_in_training_and_in_evaluation() -> None:
    for config in (TrainConfig, EvalConfig):
        with pytest.raises(InvalidInput, match=r"defaults of demo\): got 'trainer.lr'; did you mean 'trainer.learning"):
            resolve_config(config, [], taskset(**{"trainer.lr": 1e-3}))


@pytest.mark.parametrize("key", ["steps", "groups_per_step", "group_size", "max_tokens", "temperature", "threads"])
def test_zero_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{key} "):
        resolve(TrainConfig, [Layer("a.toml", {key: 0})])


def test_the_resolved_configuration_is_plain_json() -> None:
    for settings in ({}, {"algorithm": "ppo"}, {"algorithm": {"name": "dapo", "loss": "cispo", "kl.coefficient": 0.1}}):
        config = TrainConfig(model="m", **settings)
        assert TrainConfig.model_validate_json(config.model_dump_json(), strict=True) == config


ONE_ALGORITHM: list[list[dict[str, Any]]] = [
    [{"algorithm": "dapo", "algorithm.loss": "cispo", "algorithm.loss.clip_high": 3.0}],
    [{"algorithm": {"name": "dapo", "loss": {"name": "cispo", "clip_high": 3.0}}}],
    [{"algorithm.loss.clip_high": 3.0}, {"algorithm.loss": "cispo"}, {"algorithm": "dapo"}],
    [{"algorithm": build_algorithm("dapo", {"loss": "cispo", "loss.clip_high": 3.0})}],
    [{"algorithm.loss.clip_high": 3.0}, {"algorithm": build_algorithm("dapo", {"loss": "cispo"})}],
]


@pytest.mark.parametrize("layers", ONE_ALGORITHM)
def test_an_algorithm_is_a_name_a_table_or_an_object_in_any_layer(layers: list[dict[str, Any]]) -> None:
    config = resolve(TrainConfig, [Layer("test", values) for values in layers])
    assert config.algorithm == build_algorithm("dapo", {"loss": "cispo", "loss.clip_high": 3.0})


def test_an_algorithm_of_ones_own_is_given_as_an_object() -> None:
    mine = Algorithm(name="mine", advantage=WhitenedGroup(), epochs=2)
    assert resolve(TrainConfig, [Layer("test", {"algorithm": mine})]).algorithm == mine
    assert TrainConfig(algorithm=mine).algorithm == mine


def test_an_algorithm_is_text_on_the_command_line() -> None:
    texts = {"algorithm.kl": "none", "algorithm.epochs": "3", "algorithm.filters.overlong": "true"}
    algorithm = resolve(TrainConfig, [from_text(TrainConfig, texts), Layer("b.toml", {"algorithm": "ppo"})]).algorithm
    assert (algorithm.name, algorithm.kl, algorithm.epochs, algorithm.filters.overlong) == ("ppo", None, 3, True)


def test_settings_can_be_checked_without_the_algorithm() -> None:
    layer = Layer("test", {"algorithm": "none.py:NONE", "steps": 3})
    assert resolve(TrainConfig, [layer], build=False).steps == 3
    with pytest.raises(InvalidInput, match="none"):
        resolve(TrainConfig, [layer])


def test_rewards_of_single_attempts_cannot_be_shuffled() -> None:
    with pytest.raises(InvalidInput, match=r"shuffle_rewards.*give a group_size of at least 2"):
        resolve(TrainConfig, [Layer("test", {"group_size": 1, "shuffle_rewards": True})])


def test_a_group_of_settings_that_lacks_one_is_named_without_its_defaults() -> None:
    with pytest.raises(InvalidInput, match=r"^engine.vllm: got nothing; give engine.vllm.python to start servers"):
        resolve(TrainConfig, [from_text(TrainConfig, {"engine.backend": "vllm"})])

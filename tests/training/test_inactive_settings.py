"""The settings that cannot act under the other settings are named; all others can change an update."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import load_benchmark
from click.testing import CliRunner
from learning_fixtures import Make
from scenarios import MICRO
from torch import Tensor
from transformers import PreTrainedModel
from updating import make_updater, update

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.commands.algorithms import algorithms
from agent_r1.config import Layer, resolve
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Group, Trajectory
from agent_r1.tasksets import build
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.inactive_settings import chosen_inactive_settings, inactive_settings
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

CLIP = {"loss.clip_low": 0.01, "loss.clip_high": 0.01, "loss.dual_clip": 1.1}
LONG_CRITIC = {"trainer.critic_epochs": 4, "trainer.critic_minibatches": 8}
NO_OVERLONG = {"shaping.overlong": "none"}

INACTIVE: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("grpo", {}, {}, CLIP),
    ("grpo", {}, {}, {"loss": "cispo"}),
    ("grpo", {"correction.high": 3.0}, {"engine.dtype": "bfloat16"}, CLIP),
    ("gspo", {}, {}, {"ratio_level": "token"}),
    ("dppo", {}, {}, {"loss.clip_high": 0.01}),
    ("dppo", {}, {}, {"ratio_denominator": "old_policy"}),
    ("kl-cov", {"kl_cov.share": 1.0}, {}, {"kl_cov": "none"}),
    ("kl-cov", {"correction.high": 3.0, "kl_cov.share": 1.0}, {"engine.dtype": "bfloat16"}, {"kl_cov": "none"}),
    ("opsm", {}, {}, {"off_policy_mask": "none"}),
    ("m2po", {}, {}, {"token_mask": "none"}),
    ("grpo", {"correction.high": 3.0}, {}, {"correction": "none"}),
    ("grpo", {"rejection.low": 0.9}, {}, {"rejection": "none"}),
    ("grpo", {"filters.staleness": 0}, {}, {"filters.staleness": "none"}),
    ("grpo", {"shaping.overlong.max_tokens": 80, "shaping.overlong.cache_tokens": 16}, {"context": 64}, NO_OVERLONG),
    ("ppo", {}, {}, {"advantage.value_clip": 1e-4}),
    ("ppo", {}, {"trainer.critic_epochs": 1, "trainer.minibatches": 2}, {"advantage.value_clip": 1e-4}),
]
"""Algorithm, its settings, other settings of the run, and changes of settings that cannot act."""

ACTIVE: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("grpo", {}, {"trainer.minibatches": 2}, CLIP),
    ("grpo", {}, {"trainer.minibatches": 2}, {"loss": "cispo"}),
    ("gspo", {}, {"trainer.minibatches": 2}, {"ratio_level": "token"}),
    ("aipo", {"loss.max_ratio": 0.5, "entropy_coef": 0.1}, {}, {"loss.max_ratio": "none"}),
    ("dppo", {}, {"engine.dtype": "bfloat16"}, {"loss.clip_low": 1e-4, "loss.clip_high": 1e-4}),
    ("ipo", {}, {"engine.dtype": "bfloat16"}, {"loss.threshold": 1e-4}),
    ("kl-cov", {"kl_cov.share": 1.0}, {"trainer.minibatches": 2}, {"kl_cov": "none"}),
    ("opsm", {"off_policy_mask.threshold": 0.002}, {"trainer.minibatches": 4}, {"off_policy_mask": "none"}),
    ("m2po", {"token_mask.threshold": 1e-6}, {"engine.dtype": "bfloat16"}, {"token_mask": "none"}),
    ("grpo", {"correction.high": 3.0}, {"engine.dtype": "bfloat16"}, {"correction": "none"}),
    ("grpo", {"correction.high": 0.6, "entropy_coef": 0.1}, {}, {"correction": "none"}),
    ("grpo", {"shaping.overlong.max_tokens": 4, "shaping.overlong.cache_tokens": 2}, {"context": 64}, NO_OVERLONG),
    ("ppo", {}, LONG_CRITIC, {"advantage.value_clip": 1e-4}),
]
"""Algorithm, its settings, other settings of the run, and changes of settings that can act."""


def config_of(name: str, settings: dict[str, Any], others: dict[str, Any]) -> TrainConfig:
    config = resolve(TrainConfig, [Layer("test", others)])
    return config.model_copy(update={"algorithm": build_algorithm(name, settings)})


def replaced(settings: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with changes. Parameters of a component that the changes switch off are left out."""
    off = tuple(f"{key}." for key, value in changed.items() if value == "none")
    return {key: value for key, value in settings.items() if not key.startswith(off)} | changed


def named(config: TrainConfig) -> set[str]:
    return {key.removeprefix("algorithm.") for inactive in inactive_settings(config) for key in inactive.keys}


def sampled_by(model: PreTrainedModel, groups: list[Group]) -> list[Group]:
    """Return the groups with the log-probabilities that ``model`` gives to their tokens."""

    def sampled(trajectory: Trajectory) -> Trajectory:
        ids = torch.tensor([[token for turn in trajectory.turns for token in (*turn.new_ids, *turn.action_ids)]])
        with torch.no_grad():
            logits = model(ids).logits.float()[0, :-1]  # (T - 1, V)
        logprobs = [0.0, *logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist()]

        def turns() -> Iterator[Any]:
            end = 0
            for turn in trajectory.turns:
                start, end = end + len(turn.new_ids), end + len(turn.new_ids) + len(turn.action_ids)
                yield replace(turn, logprobs=tuple(logprobs[start:end]))

        return replace(trajectory, turns=tuple(turns()))

    return [replace(group, trajectories=tuple(map(sampled, group.trajectories))) for group in groups]


def weights_after_update(config: TrainConfig) -> Tensor:
    """Return the weights of the policy and of the critic after one update on samples of the engine's data type."""
    make = Make()
    model, sampler = make.model(), make.model().to(getattr(torch, config.engine.dtype))
    rates = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2}
    updater = make_updater(model, config.algorithm, **{**config.trainer.model_dump(), **rates})
    update(updater, sampled_by(sampler, make.random_groups(0)))
    critic = [tensor.flatten().float() for name, tensor in updater.state().tensors.items() if "critic" in name]
    return torch.cat([*(parameter.detach().flatten() for parameter in model.parameters()), *critic])


@pytest.mark.parametrize(("name", "settings", "others", "changed"), INACTIVE)
def test_a_named_setting_changes_nothing(
    name: str, settings: dict[str, Any], others: dict[str, Any], changed: dict[str, Any]
) -> None:
    config = config_of(name, settings, others)
    assert changed.keys() <= named(config)
    other = config_of(name, replaced(settings, changed), others)
    after = [weights_after_update(one) for one in (config, other)]
    assert after[0].allclose(after[1], atol=1e-4), "one step of Adam moves a weight by up to 1e-2"


@pytest.mark.parametrize(("name", "settings", "others", "changed"), ACTIVE)
def test_a_setting_that_changes_an_update_is_not_named(
    name: str, settings: dict[str, Any], others: dict[str, Any], changed: dict[str, Any]
) -> None:
    config = config_of(name, settings, others)
    assert not changed.keys() & named(config)
    other = config_of(name, replaced(settings, changed), others)
    after = [weights_after_update(one) for one in (config, other)]
    assert not after[0].allclose(after[1], atol=1e-4)


def test_settings_of_stale_samples_and_of_long_runs_can_act() -> None:
    assert "loss.clip_low" not in named(config_of("grpo", {}, {"max_staleness": 1}))
    assert "loss.clip_low" in named(config_of("grpo", {"correction.high": 3.0}, {"max_staleness": 1}))
    guided = {"decode.method": "token", "decode.critic": "somewhere"}
    assert "correction" not in named(config_of("grpo", {"correction.high": 3.0}, guided))
    assert "correction" in named(config_of("grpo", {"correction.high": 3.0}, {}))
    assert "filters.staleness" not in named(config_of("grpo", {"filters.staleness": 1}, {"max_staleness": 2}))
    assert "kl.sync_steps" in named(config_of("grpo", {"kl.sync_steps": 10}, {"steps": 10}))
    assert "kl.sync_steps" not in named(config_of("grpo", {"kl.sync_steps": 10}, {"steps": 11}))
    assert not named(config_of("reinforce", {}, {})), "its loss has no ratio"
    assert not named(config_of("top-k-distillation", {}, {})), "its loss has no setting that is on"
    without_advantage = named(config_of("top-k-distillation", {"loss": "clip"}, {}))
    assert without_advantage == {"loss.clip_low", "loss.clip_high", "loss.dual_clip"}


def test_the_benchmark_of_all_algorithms_trains_with_settings_in_which_their_losses_differ() -> None:
    benchmark = load_benchmark("algorithms")
    taskset = build("tinywiki", None, None, 0)
    configs = {name: benchmark.make_config(name, taskset, Path("run"), "") for name in ALGORITHMS}
    assert not {name for name, config in configs.items() if "loss" in named(config)}
    assert "loss" in named(config_of("grpo", {}, {}))  # control: with one optimizer step per batch


@pytest.mark.parametrize(
    ("options", "key", "is_named"),
    [
        ([], "loss.clip_high", True),
        (["--algorithm.loss.clip_high", "0.3"], "loss.clip_high", True),
        (["--trainer.minibatches", "2"], "loss.clip_high", False),
        (["--algorithm.epochs", "2"], "loss.clip_high", False),
        (["--algorithm.rejection.low", "0.9"], "algorithm.rejection", True),
        (["--algorithm.rejection.low", "0.9", "--engine.dtype", "bfloat16"], "algorithm.rejection", False),
    ],
)
def test_the_command_names_the_settings_that_cannot_act(options: list[str], key: str, is_named: bool) -> None:
    text = CliRunner().invoke(algorithms, ["grpo", *options]).output
    found = json.loads(CliRunner().invoke(algorithms, ["grpo", "--json", *options]).output)["algorithms"]["grpo"]
    assert ("inactive" in text) == bool(found["inactive"])
    assert any(key in sentence for sentence in found["inactive"]) == is_named


class Lines(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


def notes_of(micro: TaskSet, folder: Path, **given: object) -> list[str]:
    """Return the notes that a short run prints at its start."""
    small = {"steps": 1, "checkpoint_every": 0, "groups_per_step": 1, "group_size": 2, "run": str(folder)}
    lines = Lines()
    train(
        resolve_config(TrainConfig, [Layer("test", {**MICRO, "algorithm": "grpo", **small, **given})], micro),
        micro,
        lines,
    )
    return [line for line in lines.lines if line.startswith("note:")]


def test_a_run_accepts_a_setting_that_cannot_act_and_names_it_in_one_line(micro: TaskSet, tmp_path: Path) -> None:
    notes = notes_of(replace(micro, validation=None), tmp_path / "run", **{"algorithm.loss.clip_high": 0.28})
    assert len(notes) == 1 and "algorithm.loss.clip_high" in notes[0] and "cannot act" in notes[0]
    assert "clip_low" not in notes[0]  # nobody chose it


def test_restarts_of_ranks_are_named_without_ranks() -> None:
    chosen = resolve(TrainConfig, [Layer("test", {"trainer": {"rank_restarts": 5}})])
    notes = [str(found) for found in chosen_inactive_settings(chosen)]
    assert len(notes) == 1 and notes[0].startswith("trainer.rank_restarts cannot act:") and "trainer.ranks" in notes[0]
    several = resolve(TrainConfig, [Layer("test", {"trainer": {"rank_restarts": 5, "ranks": 2}})])
    assert not list(chosen_inactive_settings(several)) and not list(chosen_inactive_settings(TrainConfig()))


def test_a_run_with_the_default_algorithm_prints_no_note(micro: TaskSet, tmp_path: Path) -> None:
    assert inactive_settings(TrainConfig())  # control: settings of the default algorithm cannot act
    assert notes_of(replace(micro, validation=None), tmp_path / "run") == []


def test_a_run_without_validation_says_that_the_validation_tasks_are_not_used(micro: TaskSet, tmp_path: Path) -> None:
    notes = notes_of(micro, tmp_path / "run")
    assert len(notes) == 1 and "the split 'validation' is not used; set evaluate_every" in notes[0]

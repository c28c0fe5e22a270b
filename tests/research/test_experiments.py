"""Experiments of the comparison: the paper's figures, the command of each, and how its result is stored."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.cli import parse
from agent_r1.config import Layer
from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets import build
from agent_r1.training.config import EvalConfig, TrainConfig, resolve_config
from agent_r1.training.evaluate import evaluate
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train
from research.paper.experiments import (
    ABLATIONS,
    COMPARED,
    METHODS,
    Base,
    Curve,
    PaperConfig,
    Result,
    Score,
    Selected,
    Training,
    by_name,
    current_provenance,
    load_result,
    plan_experiment,
    save_result,
    select_experiments,
)

TINY = Base(0, "tiny-base", "09af259c")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_an_experiment_can_be_planned(method):
    assert plan_experiment(method, TINY, 0, 200, 24).name.startswith(f"{method.name}-base0-seed0-")


def test_an_ablation_adds_settings_to_its_full_method():
    known = by_name(METHODS)
    assert len(known) == len(METHODS) == 12
    ablations = [method for method in ABLATIONS if method.ablates is not None]
    assert len(ablations) == 3
    for method in ablations:
        full = known[method.ablates]
        assert full.settings.items() < method.settings.items() and full.critic == method.critic
        assert full in COMPARED or full.settings["algorithm.advantage.lam"] == 0.95


def typed_settings(arguments: Sequence[str]) -> Layer:
    """Return the settings that the arguments of ``agent-r1`` set."""
    return parse(arguments)[1]["settings"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_command_line_gives_the_settings_of_the_experiment(method):
    experiment = plan_experiment(method, TINY, 3, 20, 5)
    first, *later = experiment.commands("runs/x")
    config_class = TrainConfig if method.trains else EvalConfig
    taskset = build("tinywiki", None, None, 3)
    config = resolve_config(config_class, [typed_settings(first)], taskset)
    added = {"run": "runs/x"} if method.trains else experiment.sampling
    assert config == resolve_config(config_class, [Layer("test", {**experiment.settings, **added})], taskset)
    assert (config.seed, config.model) == (3, "tiny-base")
    assert [typed_settings(command).values["model"] for command in later] == ["runs/x"] * method.trains
    last = resolve_config(EvalConfig, [typed_settings([first, *later][-1])], taskset)
    assert (last.evaluate_n, last.pass_k, last.pass_attempts) == (20, 1, 2)


def test_other_settings_other_defaults_or_another_base_give_another_experiment(monkeypatch):
    grpo = by_name(METHODS)["grpo"]
    experiment = plan_experiment(grpo, TINY, 0, 200, 24)
    assert plan_experiment(grpo, TINY, 0, 200, 24) == experiment
    others = [
        plan_experiment(grpo, TINY, 1, 200, 24),
        plan_experiment(grpo, TINY, 0, 100, 24),
        plan_experiment(grpo, TINY, 0, 200, 5),
        plan_experiment(grpo, replace(TINY, digest="other"), 0, 200, 24),
    ]

    monkeypatch.setitem(ALGORITHMS, "grpo", ALGORITHMS["grpo"].model_copy(update={"entropy_coef": 0.1}))
    others.append(plan_experiment(grpo, TINY, 0, 200, 24))
    assert len({experiment.config_hash, *(other.config_hash for other in others)}) == 6


def test_a_saved_result_is_loaded_unchanged(tmp_path):
    training = Training("runs/paper/x", Curve((0.1, math.nan), (8, 16), (90, 170)), 0.01, None)
    scores = {"a": Score(0.5, 0.25, 4)}
    result = Result("grpo", 1, 0, ("agent-r1 train", "agent-r1 eval"), scores, current_provenance(), training)
    path = tmp_path / "new" / "experiment.json"
    assert load_result(path) is None
    save_result(path, result)
    assert repr(load_result(path)) == repr(result)
    path.write_text(path.read_text("utf-8")[:-20], "utf-8")
    with pytest.raises(InvalidInput, match="remove this file"):
        load_result(path)


def test_experiments_are_ordered_by_seed_and_baselines_are_measured_once_on_each_base():
    selected = select_experiments(PaperConfig(seeds=2, bases=2), METHODS)
    assert [(one.seed, one.base) for one in selected] == [
        *[(0, 0)] * 12,
        *[(0, 1)] * 12,
        *[(1, 0)] * 10,
        *[(1, 1)] * 10,
    ]
    grpo = by_name(METHODS)["grpo"]
    assert select_experiments(PaperConfig(method="grpo", seed=7)) == (Selected(grpo, 0, 7),)
    assert select_experiments(PaperConfig(method="grpo", seed=7, base=2)) == (Selected(grpo, 2, 7),)


def test_baselines_evaluated_alone_equal_those_of_a_training_run(tmp_path: Path):
    taskset = build("tinywiki", None, None, 4)
    small = {"steps": 1, "groups_per_step": 2, "group_size": 2, "evaluate_n": 8, "pass_k": 0, "seed": 4}
    layer = Layer("test", {**small, "run": str(tmp_path / "run"), "evaluate_every": 0})
    trained = train(resolve_config(TrainConfig, [layer], taskset), taskset, SilentProgress()).table.cells
    alone = evaluate(
        resolve_config(EvalConfig, [Layer("test", {"evaluate_n": 8, "pass_k": 0, "seed": 4})], taskset),
        taskset,
        SilentProgress(),
    ).cells
    assert alone["naive-rag"] == trained["naive-rag"]
    assert alone["base-tool-call"] == trained["base-tool-call"]

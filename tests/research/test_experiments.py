"""Experiments of the comparison: the paper's figures, the command of each, and how its result is stored."""

import math
from collections.abc import Sequence
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
from research.paper.config import PaperConfig, select_experiments
from research.paper.experiments import (
    Curve,
    Experiment,
    Provenance,
    Result,
    Score,
    current_provenance,
    load_result,
    plan_experiment,
    save_result,
)
from research.paper.methods import ABLATIONS, COMPARED, METHODS, Method, by_name


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_an_experiment_can_be_planned(method):
    assert plan_experiment(method, 0, 200, None).name.startswith(f"{method.name}-seed0-")


@pytest.mark.parametrize("method", [method for method in METHODS if method.figures], ids=lambda method: method.name)
def test_the_papers_averages_match_its_figures(method):
    figures = method.figures
    assert (figures.hotpotqa + figures.two_wiki + figures.musique) / 3 == pytest.approx(figures.average, abs=5.1e-5)


def test_an_ablation_adds_settings_to_its_full_method():
    known = by_name(METHODS)
    assert len(known) == len(METHODS) == 11
    for method in ABLATIONS:
        full = known[method.ablates]
        assert full in COMPARED and full.settings.items() < method.settings.items()


def typed_settings(arguments: Sequence[str]) -> Layer:
    """Return the settings that the arguments of ``agent-r1`` set."""
    return parse(arguments)[1]["settings"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_command_line_gives_the_settings_of_the_experiment(method):
    experiment = plan_experiment(method, 3, 20, 5)
    command = experiment.arguments[0]
    config_class = TrainConfig if command == "train" else EvalConfig
    taskset = build("tinywiki", None, None, 3)
    config = resolve_config(config_class, [typed_settings(experiment.arguments)], taskset)
    assert config == resolve_config(config_class, [Layer("test", experiment.settings)], taskset)
    assert config.seed == 3 and (config.n if command == "eval" else config.evaluate_n) == 20


def test_booleans_and_lists_are_written_as_the_command_line_reads_them():
    masks = Method("x", "X", "train", {"algorithm": "grpo", "algorithm.masks.loss": False})
    experiment = plan_experiment(Method("y", "Y", "eval", {"methods": ("naive-rag", "base-tool-call")}), 0, 4, None)
    assert "naive-rag,base-tool-call" in experiment.arguments
    settings = {"taskset": "tinywiki", "checkpoint_every": 0, **masks.settings}
    arguments = Experiment(masks, 0, settings, "").arguments
    assert typed_settings(arguments).values == {**settings, "algorithm.masks.loss": "false"}


def test_other_settings_or_other_defaults_give_another_experiment(monkeypatch):
    grpo = by_name(METHODS)["grpo"]
    experiment = plan_experiment(grpo, 0, 200, None)
    assert plan_experiment(grpo, 0, 200, None) == experiment
    assert plan_experiment(grpo, 0, 200, 36).config_hash == experiment.config_hash, "36 is the recipe's number of steps"
    others = [
        plan_experiment(grpo, 1, 200, None),
        plan_experiment(grpo, 0, 100, None),
        plan_experiment(grpo, 0, 200, 5),
    ]

    monkeypatch.setitem(ALGORITHMS, "grpo", ALGORITHMS["grpo"].model_copy(update={"entropy_coef": 0.1}))
    others.append(plan_experiment(grpo, 0, 200, None))
    assert len({experiment.config_hash, *(other.config_hash for other in others)}) == 5


def test_a_saved_result_is_loaded_unchanged(tmp_path):
    curve = Curve(reward=((1, 0.1), (2, math.nan)), validation=((2, 0.3),))
    result = Result("grpo", 0, "agent-r1 train", {"a": Score(0.1, 4)}, current_provenance(), "runs/paper/x", 1.5, curve)
    path = tmp_path / "new" / "experiment.json"
    assert load_result(path) is None
    save_result(path, result)
    assert repr(load_result(path)) == repr(result)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(InvalidInput, match="remove this file"):
        load_result(path)


def test_the_average_is_the_mean_over_splits():
    scores = {"a": Score(0.2, 4), "b": Score(0.4, 4), "c": Score(0.9, 4)}
    assert Result("grpo", 0, "", scores, Provenance("", {})).average == pytest.approx(0.5)


def test_experiments_are_ordered_by_seed():
    pairs = select_experiments(PaperConfig(seeds=2), METHODS)
    assert [seed for _, seed in pairs] == [0] * len(METHODS) + [1] * len(METHODS)
    assert select_experiments(PaperConfig(method="grpo", seed=7)) == ((by_name(METHODS)["grpo"], 7),)


def test_baselines_evaluated_alone_equal_those_of_a_training_run(tmp_path: Path):
    taskset = build("tinywiki", None, None, 4)
    small = {"steps": 1, "groups_per_step": 2, "group_size": 2, "evaluate_n": 8, "pass_k": 0, "seed": 4}
    layer = Layer("test", {**small, "run": str(tmp_path / "run"), "evaluate_every": 0})
    trained = train(resolve_config(TrainConfig, [layer], taskset), taskset, SilentProgress()).table.cells
    alone = evaluate(
        resolve_config(EvalConfig, [Layer("test", {"n": 8, "pass_k": 0, "seed": 4})], taskset),
        taskset,
        SilentProgress(),
    ).cells
    assert alone["naive-rag"] == trained["naive-rag"]
    assert alone["base-tool-call"] == trained["base-tool-call"]

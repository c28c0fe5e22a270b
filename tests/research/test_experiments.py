"""Cells of the comparison: the paper's facts, what each runs, and how its result is found again."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.cli import CONTEXT_SETTINGS, cli
from agent_r1.config import Layer
from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets import build
from agent_r1.training.config import EvalConfig, TrainConfig, resolve_config
from agent_r1.training.evaluate import evaluate
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train
from research.paper.config import PaperConfig, wanted
from research.paper.experiments import Curve, Origin, Result, Score, keep, kept, origin, plan
from research.paper.methods import ABLATIONS, COMPARED, METHODS, Method, by_name


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_cell_can_be_planned(method):
    assert plan(method, 0, 200, None).name.startswith(f"{method.name}-seed0-")


@pytest.mark.parametrize("method", [method for method in METHODS if method.figures], ids=lambda method: method.name)
def test_the_papers_averages_are_those_of_its_figures(method):
    figures = method.figures
    assert (figures.hotpotqa + figures.two_wiki + figures.musique) / 3 == pytest.approx(figures.average, abs=5.1e-5)


def test_an_ablation_is_its_full_row_and_one_change_more():
    known = by_name(METHODS)
    assert len(known) == len(METHODS) == 11
    for method in ABLATIONS:
        full = known[method.ablates]
        assert full in COMPARED and full.settings.items() < method.settings.items()


def typed(arguments: Sequence[str]) -> Layer:
    """Return the settings that the arguments of ``agent-r1`` set."""
    name, *rest = arguments
    with cli.commands[name].make_context(name, rest, **CONTEXT_SETTINGS) as context:
        return context.params["settings"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_command_says_what_the_cell_is(method):
    cell = plan(method, 3, 20, 5)
    command = cell.arguments[0]
    config = TrainConfig if command == "train" else EvalConfig
    taskset = build("tinywiki", None, None, 3)
    said = resolve_config(config, [typed(cell.arguments)], taskset)
    assert said == resolve_config(config, [Layer("test", cell.settings)], taskset)
    assert said.seed == 3 and (said.n if command == "eval" else said.evaluate_n) == 20


def test_booleans_and_lists_are_said_as_the_command_line_takes_them():
    masks = Method("x", "X", "train", {"algorithm": "grpo", "algorithm.masks.loss": False})
    cell = plan(Method("y", "Y", "eval", {"methods": ("naive-rag", "base-tool-call")}), 0, 4, None)
    assert "naive-rag,base-tool-call" in cell.arguments
    settings = {"taskset": "tinywiki", "checkpoint_every": 0, **masks.settings}
    text = type(cell)(masks, 0, settings, "").arguments
    assert typed(text).values == {**settings, "algorithm.masks.loss": "false"}


def test_other_settings_are_another_cell_and_so_are_other_defaults(monkeypatch):
    grpo = by_name(METHODS)["grpo"]
    cell = plan(grpo, 0, 200, None)
    assert plan(grpo, 0, 200, None) == cell
    assert plan(grpo, 0, 200, 20).digest == cell.digest, "20 steps are the recipe's"
    others = [plan(grpo, 1, 200, None), plan(grpo, 0, 100, None), plan(grpo, 0, 200, 5)]

    monkeypatch.setitem(ALGORITHMS, "grpo", ALGORITHMS["grpo"].model_copy(update={"entropy": 0.1}))
    others.append(plan(grpo, 0, 200, None))
    assert len({cell.digest, *(other.digest for other in others)}) == 5


def test_a_result_comes_back_as_it_was_kept(tmp_path):
    curve = Curve(reward=((1, 0.1), (2, math.nan)), validation=((2, 0.3),))
    result = Result("grpo", 0, "agent-r1 train", {"a": Score(0.1, 4)}, origin(), "runs/paper/x", 1.5, curve)
    path = tmp_path / "new" / "cell.json"
    assert kept(path) is None
    keep(path, result)
    assert repr(kept(path)) == repr(result)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(InvalidInput, match="remove this file"):
        kept(path)


def test_the_average_is_the_mean_over_splits():
    scores = {"a": Score(0.2, 4), "b": Score(0.4, 4), "c": Score(0.9, 4)}
    assert Result("grpo", 0, "", scores, Origin("", {})).average == pytest.approx(0.5)


def test_seeds_are_gone_through_one_after_the_other():
    pairs = wanted(PaperConfig(seeds=2), METHODS)
    assert [seed for _, seed in pairs] == [0] * len(METHODS) + [1] * len(METHODS)
    assert wanted(PaperConfig(cell="grpo", seed=7)) == ((by_name(METHODS)["grpo"], 7),)


def test_baselines_evaluated_alone_are_those_of_a_training_run(tmp_path: Path):
    taskset = build("tinywiki", None, None, 4)
    small = {"steps": 1, "groups_per_step": 2, "group_size": 2, "evaluate_n": 8, "pass_k": 0, "seed": 4}
    layer = Layer("test", {**small, "run": str(tmp_path / "run"), "evaluate_every": 0})
    trained = train(resolve_config(TrainConfig, [layer], taskset), taskset, SilentProgress()).table.cells
    alone = evaluate(resolve_config(EvalConfig, [Layer("test", {"n": 8, "seed": 4})], taskset), taskset, SilentProgress()).cells
    assert alone["naive-rag"] == trained["naive-rag"]
    assert alone["base-tool-call"] == trained["base-tool-call"]

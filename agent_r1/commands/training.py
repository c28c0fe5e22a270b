"""train, eval, paper: commands that act with a model."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

import agent_r1.tasksets
from agent_r1.commands.command import Command, Invocation, declare_output, layers, progress, show
from agent_r1.commands.eval_split import unseen
from agent_r1.commands.tasks import load, named, sandbox_json, warned
from agent_r1.config import Layer, from_text, resolve, restrict
from agent_r1.core.errors import InvalidInput
from agent_r1.store import RunReader, is_run, run_folder
from agent_r1.training.config import EvalConfig, TrainConfig, settle
from agent_r1.training.report import render, render_report, report_json, table_json
from agent_r1.training.resume import resumed
from agent_r1.training.user_task import load_world
from research.paper.config import PaperConfig, wanted

WORLDS_OWN = ("data", "corpus", "sandbox")
"""What a run was told of its world, and another world is not. To go without a sandbox is asked for each time."""


def _declare_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE.py", help="an agent of your own: defines env and tasks")
    parser.usage = "%(prog)s [FILE.py] [options]"
    declare_output(parser)


def _declare_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.toml", help="settings from a file; the command line goes first")
    parser.add_argument("--resume", action="store_true", help="go on with the run that --run names, by its settings")
    _declare_eval(parser)


def _train(invocation: Invocation) -> None:
    if invocation.options["resume"]:
        return _resume(invocation)
    file, given = invocation.options["file"], layers(TrainConfig, invocation)
    asked = resolve(TrainConfig, given)  # what is wrong by itself is said before anything is built
    world = named(asked.task, asked) if file is None else load(Path(file), asked, asked.model)
    config = settle(TrainConfig, given, world)
    from agent_r1.training import run

    report = run.train(config, world, warned(world, progress(invocation)))
    show(invocation, report_json(report) | sandbox_json(world), render_report(report))


def _resume(invocation: Invocation) -> None:
    file, config = invocation.options["file"], resumed(layers(TrainConfig, invocation))
    if file is None and config.task not in agent_r1.tasksets.WORLDS:
        do = f"give the file that the run was started with, which is its task {config.task!r}"
        raise InvalidInput("FILE.py", got="none", do=do)
    world = named(config.task, config) if file is None else load_world(Path(file), config.model)
    from agent_r1.training import run

    report = run.resume(config, world, warned(world, progress(invocation)))
    show(invocation, report_json(report) | sandbox_json(world), render_report(report))


def _eval(invocation: Invocation) -> None:
    given = [from_text(EvalConfig, invocation.settings)]
    typed = resolve(EvalConfig, given)
    folder, trained = run_folder(typed.model), None
    if is_run(folder):
        with closing(RunReader(folder)) as reader:
            own = reader.config()
        trained = resolve(TrainConfig, [Layer(f"configuration of {folder}", own)])
        if invocation.settings.get("task", own["task"]) != own["task"]:
            own = {key: value for key, value in own.items() if key not in WORLDS_OWN}
        own = {key: value for key, value in own.items() if (key, value) != ("sandbox", "none")}
        given.append(restrict(Layer(f"configuration of {folder}", own), EvalConfig, TrainConfig))
    asked, file = resolve(EvalConfig, given), invocation.options["file"]
    if file is None:
        world = unseen(named(asked.task, asked), asked, trained, progress(invocation))
    else:
        world = load(Path(file), typed, asked.model)
    config = settle(EvalConfig, given, world)
    from agent_r1.training.evaluate import evaluate

    table = evaluate(config, world, warned(world, progress(invocation)))
    show(invocation, table_json(table) | sandbox_json(world), render(table))


def _paper(invocation: Invocation) -> None:
    config = resolve(PaperConfig, [from_text(PaperConfig, invocation.settings)])
    wanted(config)  # what is wrong by itself is said before torch is loaded
    from research.paper.compare import compare, comparison_json, render_comparison

    comparison = compare(config, progress(invocation))
    show(invocation, comparison_json(comparison), render_comparison(comparison))
    comparison.require_all()


TRAIN = Command("train an agent; without arguments: TinyWiki, tiny-base, grpo", _train, _declare_train, TrainConfig)
EVAL = Command("print the table of methods", _eval, _declare_eval, EvalConfig)
PAPER = Command("the paper's comparison in miniature, on TinyWiki", _paper, declare_output, PaperConfig)

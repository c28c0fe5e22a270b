"""tasks, check, play, retriever: commands on the worlds themselves. None of them loads torch before it has to."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

import agent_r1.tasksets
from agent_r1.commands.command import (
    Broken,
    Command,
    Invocation,
    columns,
    declare_json,
    declare_quiet,
    layers,
    progress,
    show,
)
from agent_r1.config import from_text, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.retrieval.config import RetrieverConfig
from agent_r1.retrieval.protocol import Health
from agent_r1.training.config import CheckConfig, PlayConfig, WorldConfig
from agent_r1.training.report import Progress
from agent_r1.training.user_task import load_world


def _declare_retriever(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.toml", help="settings from a file; the command line goes first")
    declare_json(parser)


def _declare_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="TASK", help="one that agent-r1 tasks lists, or FILE.py")
    declare_json(parser)


def _declare_check(parser: argparse.ArgumentParser) -> None:
    _declare_world(parser)
    declare_quiet(parser)


def _tasks(invocation: Invocation) -> None:
    descriptions = {name: entry.description for name, entry in agent_r1.tasksets.WORLDS.items()}
    show(invocation, {"tasks": descriptions}, columns(descriptions))


def _check(invocation: Invocation) -> None:
    config = resolve(CheckConfig, [from_text(CheckConfig, invocation.settings)])
    world = named(invocation.options["name"], config)
    from agent_r1.training.check import check, render_checked

    checked = check(config, world, warned(world, progress(invocation)))
    show(invocation, checked.to_json() | sandbox_json(world), render_checked(checked))
    if not checked.holds:
        raise Broken(f"{world.name} does not hold: {len(checked.faults)} faults")


def _play(invocation: Invocation) -> None:
    config = resolve(PlayConfig, [from_text(PlayConfig, invocation.settings)])
    world = named(invocation.options["name"], config)
    from agent_r1.training.play import play

    played = play(config, world, Console(highlight=False))
    show(invocation, played.to_json(), Text(played.text))


def _retriever(invocation: Invocation) -> None:
    given = layers(RetrieverConfig, invocation)
    from agent_r1.retrieval.serve import serve

    def started(url: str, health: Health) -> None:
        said = f"{health.passages} passages by {health.search} at {url}; stop with Ctrl-C or SIGTERM"
        show(invocation, {"url": url, **health.model_dump()}, said)
        sys.stdout.flush()

    serve(resolve(RetrieverConfig, given), started)


def named(name: str, asked: WorldConfig) -> TaskSet:
    """The world that TASK names: one of ours, or the one that a file describes."""
    if name.endswith(".py"):
        return load(Path(name), asked, "")
    return agent_r1.tasksets.build(name, asked.data, asked.corpus, asked.seed, asked.sandbox)


def warned(world: TaskSet, progress: Progress) -> Progress:
    """The same progress, after it has said what a world without a sandbox means."""
    if world.sandbox is not None and world.sandbox.startswith("none"):
        progress.say("WARNING: sandbox none: programs written by a model run with your rights, files and network")
    return progress


def sandbox_json(world: TaskSet) -> dict[str, str]:
    """What the JSON of a command says of the sandbox; nothing of a world that runs no code."""
    return {} if world.sandbox is None else {"sandbox": world.sandbox}


def load(file: Path, asked: WorldConfig, model: str) -> TaskSet:
    for name in ("task", "data", "corpus", "sandbox"):
        if name in asked.model_fields_set:
            raise InvalidInput(f"--{name}", got=f"it and {file}", do="leave one out: the file is the task")
    return load_world(file, model)


TASKS = Command("list the worlds there are", _tasks, declare_json)
CHECK = Command("let a world prove itself by its right and wrong solutions", _check, _declare_check, CheckConfig)
PLAY = Command("play an episode in the terminal", _play, _declare_world, PlayConfig)
RETRIEVER = Command("serve the search of a corpus over HTTP", _retriever, _declare_retriever, RetrieverConfig)

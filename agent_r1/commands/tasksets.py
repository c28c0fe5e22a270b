"""The commands ``tasksets``, ``check``, ``play`` and ``retriever``.

Modules that need torch are imported inside the commands, so that other commands start fast.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

import agent_r1.tasksets
from agent_r1.commands.command import (
    SettingsCommand,
    columns,
    config_option,
    json_option,
    progress_of,
    quiet_option,
    show,
    with_file,
)
from agent_r1.config import Layer, resolve
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.retrieval.config import RetrieverConfig
from agent_r1.retrieval.protocol import Health
from agent_r1.training.config import CheckConfig, PlayConfig, TasksetConfig
from agent_r1.training.progress import Progress
from agent_r1.training.user_task import load_task_file


@click.command()
@json_option
def tasksets(as_json: bool) -> None:
    """List the task sets."""
    descriptions = {name: entry.description for name, entry in agent_r1.tasksets.TASKSETS.items()}
    show(as_json, {"tasksets": descriptions}, columns(descriptions))


@click.command(cls=SettingsCommand, config=CheckConfig)
@click.argument("taskset")
@json_option
@quiet_option
def check(taskset: str, settings: Layer, as_json: bool, quiet: bool) -> None:
    """Check that a task set rewards its right solutions, and not its wrong ones. TASKSET is a name, or a FILE.py."""
    config = resolve(CheckConfig, [settings])
    opened = open_taskset(taskset, config)
    from agent_r1.training import check

    report = check.check(config, opened, warn_unsandboxed(opened, progress_of(quiet)))
    show(as_json, report.to_json() | sandbox_json(opened), check.render_report(report))
    if not report.passed:
        raise AgentR1Error(f"{opened.name} did not pass: {len(report.failures)} failures")


@click.command(cls=SettingsCommand, config=PlayConfig)
@click.argument("taskset")
@json_option
def play(taskset: str, settings: Layer, as_json: bool) -> None:
    """Play an episode in the terminal. TASKSET is a name, or a FILE.py."""
    config = resolve(PlayConfig, [settings])
    opened = open_taskset(taskset, config)
    from agent_r1.training import play

    result = play.play(config, opened, Console(highlight=False))
    show(as_json, result.to_json(), Text(result.text))


@click.command(cls=SettingsCommand, config=RetrieverConfig)
@config_option
@json_option
def retriever(settings: Layer, config_file: Path | None, as_json: bool) -> None:
    """Serve the search of a corpus over HTTP."""
    config = resolve(RetrieverConfig, with_file(settings, config_file))
    from agent_r1.retrieval.serve import serve

    def announce(url: str, health: Health) -> None:
        text = f"{health.passages} passages by {health.search} at {url}; stop with Ctrl-C or SIGTERM"
        show(as_json, {"url": url, **health.model_dump()}, text)
        sys.stdout.flush()

    serve(config, announce)


def open_taskset(name: str, config: TasksetConfig) -> TaskSet:
    """Return a task set. ``name`` is the name of a built-in task set, or the path of a ``.py`` file with a task set."""
    if name.endswith(".py"):
        return open_file(Path(name), config, "")
    return agent_r1.tasksets.build(name, config.data, config.corpus, config.seed, config.sandbox, config.encoder)


def open_file(file: Path, config: TasksetConfig, model: str) -> TaskSet:
    """Return the task set that a Python file defines under the names ``env`` and ``tasks``.

    ``model`` is the name of the model, or "". Raise InvalidInput if the file cannot be used, or if ``config`` sets
    ``taskset``, ``data``, ``corpus``, ``encoder`` or ``sandbox``.
    """
    for name in ("taskset", "data", "corpus", "encoder", "sandbox"):
        if name in config.model_fields_set:
            do = "leave one out: the file defines its own task set"
            raise InvalidInput(f"--{name}", got=f"it and {file}", do=do)
    return load_task_file(file, model)


def warn_unsandboxed(taskset: TaskSet, progress: Progress) -> Progress:
    """Print a warning on ``progress`` if code from the policy is executed without a sandbox. Return ``progress``."""
    if taskset.sandbox is not None and taskset.sandbox.startswith("none"):
        progress.print_line(
            "WARNING: sandbox none: programs written by a model run with your rights, files and network"
        )
    return progress


def sandbox_json(taskset: TaskSet) -> dict[str, str]:
    """Return how code written by the policy is isolated, for JSON output: ``{"sandbox": "bubblewrap: files"}``.

    Return {} if the task set runs no such code.
    """
    return {} if taskset.sandbox is None else {"sandbox": taskset.sandbox}

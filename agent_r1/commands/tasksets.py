"""The commands ``tasksets``, ``check``, ``play`` and ``retriever``.

Modules that need torch are imported inside the commands, so that other commands start fast.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Container
from importlib.resources import files
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

import agent_r1.tasksets
from agent_r1.commands.command import (
    FilePath,
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
from agent_r1.core.files import atomic_dir
from agent_r1.core.taskset import TaskSet
from agent_r1.retrieval.config import RetrieverConfig
from agent_r1.training.config import TasksetConfig, TrainConfig
from agent_r1.training.mixture import load_mixture
from agent_r1.training.progress import Progress
from agent_r1.training.user_task import load_task_file


@click.command()
@json_option
def tasksets(as_json: bool) -> None:
    """List the task sets."""
    descriptions = {name: entry.description for name, entry in agent_r1.tasksets.TASKSETS.items()}
    show(as_json, {"tasksets": descriptions}, columns(descriptions))


@click.command(cls=SettingsCommand, config=TasksetConfig)
@click.argument("taskset")
@click.option("--n", type=click.IntRange(0), default=50, show_default=True, help="Tasks per split; 0: all tasks.")
@json_option
@quiet_option
def check(taskset: str, n: int, settings: Layer, as_json: bool, quiet: bool) -> None:
    """Check that a task set rewards its right solutions, and not its wrong ones. TASKSET is a name, or a FILE.py."""
    config, progress = resolve(TasksetConfig, [settings]), progress_of(quiet)
    opened = open_taskset(taskset, config)
    note_disputed(opened, (), progress)
    from agent_r1.training import check

    report = check.check(opened, warn_unsandboxed(opened, progress), n=n, seed=config.seed)
    show(as_json, report.to_json() | sandbox_json(opened), check.render_report(report))
    if not report.passed:
        raise AgentR1Error(f"{opened.name} did not pass: {len(report.failures)} failures")


@click.command(cls=SettingsCommand, config=TasksetConfig)
@click.argument("taskset")
@click.option("--split", default="train", show_default=True, help="Split of the task.")
@click.option("--number", type=click.IntRange(0), help="Index of the task in its split; by default a random task.")
@json_option
def play(taskset: str, split: str, number: int | None, settings: Layer, as_json: bool) -> None:
    """Play an episode in the terminal. TASKSET is a name, or a FILE.py."""
    config = resolve(TasksetConfig, [settings])
    opened = open_taskset(taskset, config)
    from agent_r1.training import play

    result = play.play(opened, Console(highlight=False), split=split, number=number, seed=config.seed)
    show(as_json, result.to_json(), Text(result.text))


@click.command(cls=SettingsCommand, config=RetrieverConfig)
@config_option
@json_option
def retriever(settings: Layer, config_file: Path | None, as_json: bool) -> None:
    """Serve the search of a corpus over HTTP."""
    config = resolve(RetrieverConfig, with_file(settings, config_file))
    from agent_r1.retrieval.client import Health
    from agent_r1.retrieval.server import serve

    def announce(url: str, health: Health) -> None:
        text = f"{health.passages} passages by {health.search} at {url}; stop with Ctrl-C or SIGTERM"
        show(as_json, {"url": url, **health.model_dump()}, text)
        sys.stdout.flush()

    serve(config, announce)


def open_taskset(name: str, config: TasksetConfig, model: str = "") -> TaskSet:
    """Return a task set: a name, a mixture FILE.toml, or the path of what has ``build``, or ``env`` and ``tasks``."""
    if name.endswith(".toml"):
        sources = (config.data, config.corpus, config.encoder or None, config.sandbox)
        if any(source is not None for source in sources):
            do = f"leave them out: each part in {name} has its own"
            raise InvalidInput("--data, --corpus, --encoder, --sandbox", got=f"it and {name}", do=do)
        return load_mixture(Path(name), config.seed, model)
    if name.endswith(".py") and not agent_r1.tasksets.has_build(Path(name)):
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


def note_disputed(taskset: TaskSet, given: Container[str], progress: Progress) -> None:
    """Print the settings that are not ``given``, and on which the parts of a mixture disagree."""
    for key, values in taskset.disputed.items():
        if key not in given:
            used = f"{taskset.recipe[key]} is used; give --{key} for another"
            progress.print_line(f"note: the parts disagree on {key} ({values}): {used}")


def warn_unsandboxed(taskset: TaskSet, progress: Progress) -> Progress:
    """Print a warning on ``progress`` if code from the policy is executed without a sandbox. Return ``progress``."""
    if taskset.sandbox is not None and taskset.sandbox.startswith("none"):
        progress.print_line(
            "WARNING: sandbox none: programs written by a model run with your rights, files and network"
        )
    return progress


def sandbox_json(taskset: TaskSet) -> dict[str, str]:
    """Return how code of the policy is isolated, for JSON output; {} if the task set runs no such code."""
    return {} if taskset.sandbox is None else {"sandbox": taskset.sandbox}


@click.command(cls=SettingsCommand, config=TasksetConfig)
@click.argument("taskset")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; except loopback, it needs a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8200, show_default=True, help="Port; 0: any free port.")
@click.option("--max_episodes", type=click.IntRange(1), default=1024, show_default=True, help="Limit of episodes.")
@click.option(
    "--idle_seconds",
    type=click.IntRange(1),
    default=900,
    show_default=True,
    help="Seconds without a request after which an episode is closed: more than between two actions.",
)
@click.option("--token", envvar="AGENT_R1_WORKER_TOKEN", default="", help="Token that runs must have.")
@click.option(
    "--protocol",
    type=click.Choice(["agent-r1", "openenv"]),
    default="agent-r1",
    show_default=True,
    help="agent-r1: for runs of this program. openenv: for other trainers.",
)
@config_option
@json_option
def serve_env(
    taskset: str,
    settings: Layer,
    host: str,
    port: int,
    max_episodes: int,
    idle_seconds: int,
    token: str,
    protocol: str,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Serve the environments of a task set to runs on other machines. TASKSET is a name, or a FILE.py.

    This command starts a worker. A run uses the worker if --environment.workers lists the worker's address. Whoever has
    the token can run the tools.
    """
    config = resolve(TasksetConfig, with_file(settings, config_file), TrainConfig)
    opened = open_taskset(taskset, config)
    warn_unsandboxed(opened, progress_of(as_json))
    from agent_r1.training.environments import serve_environments, serve_openenv
    from agent_r1.workers.protocol import WorkerDescription
    from agent_r1.workers.server import WorkerLimits

    def announce(url: str, description: WorkerDescription | None = None) -> None:
        text = f"environments of {opened.name} at {url}; stop with Ctrl-C or SIGTERM"
        described = description.model_dump() if description is not None else {"taskset": opened.name}
        show(as_json, {"url": url, **described, **sandbox_json(opened)}, text)
        sys.stdout.flush()

    limits = WorkerLimits(max_episodes, idle_seconds)
    if protocol == "openenv":
        return serve_openenv(opened, token, announce, host=host, port=port, limits=limits)
    serve_environments(config, opened, token, announce, host=host, port=port, limits=limits)


SUFFIX = ".template"
"""The suffix of template files. Without this suffix, a template would be a module of this package."""


@click.command()
@click.argument("folder", metavar="NAME", type=FilePath())
@json_option
def init(folder: Path, as_json: bool) -> None:
    """Write a new project that can be trained at once.

    NAME is the new folder of the project. The folder gets an agent (a tool, a reward, tasks), a test of the agent,
    settings, and a README.
    """
    written = write_project(folder)
    run = f"cd {shlex.quote(str(folder))} && agent-r1 train agent.py --config train.toml"
    text = Text(f"{folder}: {', '.join(written)}\nto train it: {run}")
    show(as_json, {"folder": str(folder), "files": written}, text)


def write_project(folder: Path) -> list[str]:
    """Write the files of a new project to ``folder``, and return the names of the files."""
    if os.path.lexists(folder):
        raise InvalidInput("NAME", got=f"{folder}, which exists", do="give the name of a new folder")
    templates = [path for path in (files("agent_r1") / "templates" / "project").iterdir() if path.name.endswith(SUFFIX)]
    try:
        with atomic_dir(folder) as temporary:
            for template in templates:
                text = template.read_text(encoding="utf-8").replace("{name}", folder.absolute().name)
                (temporary / template.name.removesuffix(SUFFIX)).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error  # without the name of the temporary folder
        raise InvalidInput("NAME", got=f"{folder}: {reason}", do="give a folder that can be written") from None
    return sorted(template.name.removesuffix(SUFFIX) for template in templates)

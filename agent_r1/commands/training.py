"""The commands ``train``, ``eval`` and ``smoke``."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path

import click

import agent_r1.tasksets
from agent_r1.commands.command import (
    FilePath,
    SettingsCommand,
    config_option,
    json_option,
    progress_of,
    quiet_option,
    show,
    with_file,
)
from agent_r1.commands.eval_questions import with_unseen_questions
from agent_r1.commands.tasksets import open_file, open_taskset, sandbox_json, warn_unsandboxed
from agent_r1.config import Layer, resolve, restrict
from agent_r1.core.errors import AgentR1Error, Interrupted, InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.store import RunReader, is_run, run_folder
from agent_r1.store.folder import path_argument
from agent_r1.store.results import read_file
from agent_r1.training.config import EvalConfig, TrainConfig, TrainSettings, resolve_config
from agent_r1.training.resume import resolve_resume_config
from agent_r1.training.tables import TrainReport, render_report, render_table, report_json, table_json
from agent_r1.training.user_task import load_task_file

NOT_FOR_OTHER_TASKSETS = ("data", "corpus", "encoder", "sandbox")
"""Settings of a run that have no effect if the run is evaluated on a different task set."""

file_argument = click.argument("file", required=False, metavar="[FILE.py]", type=FilePath())


@click.command(cls=SettingsCommand, config=TrainConfig)
@file_argument
@config_option
@click.option("--resume", is_flag=True, help="Continue the run that --run names, with its own settings.")
@json_option
@quiet_option
def train(
    file: Path | None, settings: Layer, config_file: Path | None, resume: bool, as_json: bool, quiet: bool
) -> None:
    """Train an agent. Without arguments, train the model tiny-base with grpo on the task set tinywiki.

    FILE.py defines your own agent under the names env and tasks.
    """
    layers = with_file(settings, config_file)
    try:
        report, taskset = (_resume if resume else _train)(file, layers, quiet)
    except Interrupted as stopped:
        arguments = [*([str(file)] if file else []), "--run", str(stopped.folder), "--resume"]
        command = shlex.join(["agent-r1", "train", *arguments])
        raise Interrupted(stopped.number, f"{stopped}; to continue: {command}", stopped.folder) from None
    show(as_json, report_json(report) | sandbox_json(taskset), render_report(report))


@click.command(cls=SettingsCommand, config=TrainConfig)
@file_argument
@config_option
@json_option
@quiet_option
def smoke(file: Path | None, settings: Layer, config_file: Path | None, as_json: bool, quiet: bool) -> None:
    """Check a machine or a cluster before a long run, with the settings of the run.

    The services of the run are started, a few attempts are sampled and trained on, and weights are published. If there
    are several servers, one server is killed. No run is written.
    """
    config, taskset = _open(file, with_file(settings, config_file))
    from agent_r1.training.smoke import render_report, smoke

    report = smoke(config, taskset, warn_unsandboxed(taskset, progress_of(quiet)))
    show(as_json, report.to_json() | sandbox_json(taskset), render_report(report))
    if (first := report.first_failure) is not None:
        raise AgentR1Error(f"{first.name} failed: {first.detail}")


def _open(file: Path | None, layers: list[Layer]) -> tuple[TrainConfig, TaskSet]:
    # Report invalid settings before anything is built or torch is imported.
    given = resolve(TrainSettings, [restrict(layer, TrainSettings, TrainConfig) for layer in layers])
    taskset = open_taskset(given.taskset, given) if file is None else open_file(file, given, given.model)
    return resolve_config(TrainConfig, layers, taskset), taskset


def _train(file: Path | None, layers: list[Layer], quiet: bool) -> tuple[TrainReport, TaskSet]:
    config, taskset = _open(file, layers)
    from agent_r1.training import run

    return run.train(config, taskset, warn_unsandboxed(taskset, progress_of(quiet))), taskset


def _resume(file: Path | None, layers: list[Layer], quiet: bool) -> tuple[TrainReport, TaskSet]:
    config = resolve_resume_config(layers)
    if file is None:
        require_file(run_folder(config.run), config.taskset)
    taskset = open_taskset(config.taskset, config) if file is None else load_task_file(file, config.model)
    from agent_r1.training import run

    return run.resume(config, taskset, warn_unsandboxed(taskset, progress_of(quiet))), taskset


def require_file(folder: Path, taskset: str) -> None:
    """Raise InvalidInput if the task set ``taskset`` of a run is not built in. Call this if the user gave no file.

    The error asks for the Python file that defines the task set. ``folder`` is the folder of the run.
    """
    if taskset not in agent_r1.tasksets.TASKSETS:
        with closing(RunReader(folder)) as reader:
            file = read_file(reader)
        named = "" if file is None else f", {path_argument(file)}"
        do = f"give the file that the run was started with{named}, which defines {taskset!r}"
        raise InvalidInput("FILE.py", got="none", do=do)


@click.command("eval", cls=SettingsCommand, config=EvalConfig)
@file_argument
@config_option
@json_option
@quiet_option
def evaluate(file: Path | None, settings: Layer, config_file: Path | None, as_json: bool, quiet: bool) -> None:
    """Compare a model, a folder or a run with the baselines, in a table.

    The file of --config can be a configuration for training. Settings that only training has are ignored.
    """
    layers = [restrict(layer, EvalConfig, TrainConfig) for layer in with_file(settings, config_file)]
    given, trained = resolve(EvalConfig, layers), None
    folder, progress = run_folder(given.model), progress_of(quiet)
    if is_run(folder):
        own = config_of_run(folder)
        trained = resolve(TrainSettings, [restrict(own, TrainSettings, TrainConfig)])
        other_taskset = "taskset" in given.model_fields_set and given.taskset != trained.taskset
        layers.append(restrict(_for_evaluation(own, other_taskset), EvalConfig, TrainConfig))
        if file is None and not other_taskset:
            require_file(folder, trained.taskset)
    config = resolve(EvalConfig, layers)
    if file is None:
        taskset = with_unseen_questions(open_taskset(config.taskset, config), config, trained, progress)
    else:
        taskset = open_file(file, given, config.model)
    config = resolve_config(EvalConfig, layers, taskset)
    from agent_r1.training.evaluate import evaluate

    table = evaluate(config, taskset, warn_unsandboxed(taskset, progress))
    show(as_json, table_json(table) | sandbox_json(taskset), render_table(table))


def config_of_run(folder: Path) -> Layer:
    with closing(RunReader(folder)) as reader:
        return Layer(f"configuration of {folder}", reader.config())


def _for_evaluation(own: Layer, other_taskset: bool) -> Layer:
    """Return the settings in ``own`` that also apply to an evaluation. ``own`` holds all settings of the evaluated run.

    If ``other_taskset`` is true, the evaluation uses a different task set than the training. Then settings such as
    ``data`` and ``corpus`` are not in the result.
    """
    # Only the user can choose to evaluate without a sandbox. The critic that guided the training (decode) need not
    # guide the evaluation.
    left_out = ("decode", *(NOT_FOR_OTHER_TASKSETS if other_taskset else ()))
    kept = {key: value for key, value in own.values.items() if key not in left_out}
    return Layer(own.source, {key: value for key, value in kept.items() if (key, value) != ("sandbox", "none")})

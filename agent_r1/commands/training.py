"""The commands ``train``, ``eval`` and ``smoke``."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import agent_r1.tasksets
from agent_r1.commands.command import (
    FilePath,
    SettingsCommand,
    columns,
    config_option,
    find_run,
    json_option,
    progress_of,
    quiet_option,
    show,
    with_file,
)
from agent_r1.commands.tasksets import note_disputed, open_file, open_taskset, sandbox_json, warn_unsandboxed
from agent_r1.config import Layer, resolve, settings_of
from agent_r1.core.errors import AgentR1Error, Interrupted, InvalidInput
from agent_r1.core.redaction import flat_settings
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.reward_models.config import RewardModelConfig
from agent_r1.store.folder import path_argument, run_folder
from agent_r1.store.manifest import read_digest_file
from agent_r1.store.reader import RunReader, read_file
from agent_r1.store.saved_weights import named_run
from agent_r1.tasksets import TRANSCRIPTS
from agent_r1.tasksets.files import normalized_text
from agent_r1.training.config import CriticConfig, EvalConfig, TrainConfig, resolve_config
from agent_r1.training.progress import Progress
from agent_r1.training.resume import resolve_resume_config
from agent_r1.training.tables import render_report, render_table, render_tasks, report_json, table_json
from agent_r1.training.user_task import load_task_file

if TYPE_CHECKING:
    from agent_r1.reward_models.evaluation import Evaluation, Separation
    from agent_r1.reward_models.train import RewardModelReport
    from agent_r1.training.memory_estimate import MemoryPlan


def with_unseen_questions(
    taskset: TaskSet, config: EvalConfig, trained: TrainConfig | None, progress: Progress
) -> TaskSet:
    """Return the task set without the questions that the evaluated model was trained on.

    The evaluation splits of the data file that it was trained on hold none of them. Of another data file, the training
    questions are removed from all splits, and the split with all tasks (``taskset.whole``) is evaluated.
    """
    # The parts of a mixture have data of their own, which can also be this file.
    if trained is not None and config.data is not None and (trained.data or trained.taskset.endswith(".toml")):
        if trained.data is not None and trained.data.resolve() == config.data.resolve():
            return taskset
        taskset = _exclude(taskset, _training_questions(trained, progress))
    return taskset if taskset.whole is None else replace(taskset, evaluation=(taskset.whole,))


def _exclude(taskset: TaskSet, questions: frozenset[str]) -> TaskSet:
    def tasks(split: str) -> Sequence[Task]:
        kept = [task for task in taskset.tasks(split) if _question(task) not in questions]
        if not kept:
            got = f"{split}, in which the run was trained on every question"
            raise InvalidInput("--data", got=got, do="give questions that it was not trained on")
        return kept

    return replace(taskset, tasks=tasks)


def _training_questions(trained: TrainConfig, progress: Progress) -> frozenset[str]:
    try:
        own = open_taskset(trained.taskset, trained, trained.model)
    except InvalidInput as error:
        progress.print_line(f"WARNING: training questions may be among these, as they cannot be read: {error}")
        return frozenset()
    return frozenset(map(_question, own.tasks("train")))


def _question(task: Task) -> str:
    return normalized_text(task.messages[-1].text)


NOT_FOR_OTHER_TASKSETS = ("data", "corpus", "encoder", "sandbox")
"""Settings of a run that have no effect if the run is evaluated on a different task set."""

NO_SANDBOX = ("sandbox", "none")

COMMON = frozenset(
    (
        *("taskset", "data", "model", "agent", "context_policy.name", "max_tokens", "context", "seed", "device"),
        *("engine.backend", "engine.dtype", "algorithm", "run", "steps", "groups_per_step", "group_size"),
        *("max_staleness", "temperature", "reward_weights", "evaluate_every", "evaluate_n", "checkpoint_every"),
        *("track", "trainer.learning_rate", "trainer.minibatches", "trainer.lora.rank", "trainer.dtype"),
        *("trainer.ranks", "methods", "splits", "pass_k", "api_url", "api_model", "labels"),
    )
)
"""The settings that ``--help`` shows; ``--help_all`` shows all."""

file_argument = click.argument("file", required=False, metavar="[FILE.py]", type=FilePath())


@click.command(cls=SettingsCommand, config=TrainConfig, common=COMMON)
@file_argument
@config_option
@click.option("--resume", is_flag=True, help="Continue the run that --run names, with its own settings.")
@click.option("--dry_run", is_flag=True, help="Check the run, print its memory and its settings, and start nothing.")
@json_option
@quiet_option
def train(
    file: Path | None,
    settings: Layer,
    config_file: Path | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train an agent. Without arguments, train the model tiny-base with grpo on the task set tinywiki.

    FILE.py defines your own agent under the names env and tasks.
    """
    layers, progress = with_file(settings, config_file), progress_of(quiet)
    if resume and dry_run:
        raise InvalidInput("--dry_run", got="it and --resume", do="leave one out: a dry run checks a new run")
    if resume:
        config, taskset = _open_run(file, layers)
    else:
        config, taskset = _open(file, layers, progress)
    warn_unsandboxed(taskset, progress)
    _train_and_show(config, taskset, progress, file, as_json, resume=resume, dry_run=dry_run)


def _train_and_show(
    config: TrainConfig,
    taskset: TaskSet,
    progress: Progress,
    file: Path | None,
    as_json: bool,
    *,
    resume: bool = False,
    dry_run: bool = False,
) -> None:
    from agent_r1.training import run

    if dry_run:
        _show_plan(as_json, config, run.dry_run(config, taskset))
        return
    try:
        report = (run.resume if resume else run.train)(config, taskset, progress)
    except Interrupted as stopped:
        arguments = [*([str(file)] if file else []), "--run", str(stopped.folder), "--resume"]
        command = shlex.join(["agent-r1", "train", *arguments])
        raise Interrupted(stopped.number, f"{stopped}; to continue: {command}", stopped.folder) from None
    # Kept elsewhere, this digest also finds changes by somebody who computes the digests of the run again.
    closed = read_digest_file(report.run)
    rows = None if closed is None else json.loads(closed)["sha256"]
    shown = Group(render_report(report), Text(f"sha256 of its rows: {rows}"))
    show(as_json, report_json(report) | sandbox_json(taskset) | {"rows_sha256": rows}, shown)


def _show_plan(as_json: bool, config: TrainConfig, memory: MemoryPlan) -> None:
    # Print the memory of a run, and its settings that differ from the defaults of TrainConfig.
    from agent_r1.algorithms.registry import DESCRIPTIVE

    defaults, described = (flat_settings(one.model_dump(mode="json")) for one in (TrainConfig(), config))
    hidden = {f"algorithm.{name}" for name in DESCRIPTIVE if name != "name"}
    chosen = {key: value for key, value in described.items() if key not in hidden and value != defaults.get(key)}
    data = {"bytes": memory.total, "micro_tokens": memory.micro_tokens, **{use.name: use.size for use in memory.uses}}
    rows = {use.name: f"{use.size / 2**30:.2f} GiB" for use in memory.uses}
    rows["in all"] = f"{memory.total / 2**30:.2f} GiB, estimated and with the overhead of allocators"
    settings = columns({key: str(value) for key, value in chosen.items()})
    text = Group(Text("memory"), columns(rows), Text("\nsettings that differ from the defaults"), settings)
    show(as_json, {"memory": data, "settings": chosen}, text)


FROM_TASKSET = ("model", "tool_format", "tags", "max_tokens", "context", "own_code")
"""The settings of a task set or of a run that also fit a model that imitates its solutions or attempts."""


FOR_SFT = frozenset(
    (
        *("taskset", "model", "context", "tool_format", "seed", "device", "run", "steps", "groups_per_step"),
        *("evaluate_every", "checkpoint_every", "track", "trainer.learning_rate", "trainer.schedule.name"),
        *("trainer.lora.rank", "trainer.dtype", "trainer.ranks"),
    )
)
"""The settings that ``agent-r1 sft --help`` shows."""


@click.command(cls=SettingsCommand, config=TrainConfig, common=FOR_SFT)
@click.argument("file", required=False, metavar="[DATA]", type=FilePath())
@config_option
@click.option("--from", "from_run", metavar="RUN", help="Imitate the attempts of RUN, instead of DATA.")
@click.option("--min_reward", type=float, help="Least reward of the attempts of RUN.  [default: 1]")
@click.option("--from_solutions", is_flag=True, help="Imitate the solutions of the task set that --taskset names.")
@click.option("--n", "number", type=click.IntRange(1), help="Number of solutions.  [default: 200]")
@click.option("--epochs", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True, help="Passes.")
@click.option("--dry_run", is_flag=True, help="Check the run, print its memory and its settings, and start nothing.")
@json_option
@quiet_option
def sft(
    file: Path | None,
    settings: Layer,
    config_file: Path | None,
    from_run: str | None,
    min_reward: float | None,
    from_solutions: bool,
    number: int | None,
    epochs: float,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fine-tune a model on the assistant's messages of transcripts: a start for 'agent-r1 train --model RUN'.

    DATA is a JSONL file of rows {"messages": [..], "tools": [..]} in the OpenAI format, or hf:NAME. Rows with "split":
    "validation" choose the best step. To continue a stopped run: agent-r1 train --run RUN --resume.
    """
    layers, progress = with_file(settings, config_file), progress_of(quiet)
    given = resolve(TrainConfig, layers, build=False)
    given_sources = {"DATA": file is not None, "--from": from_run is not None, "--from_solutions": from_solutions}
    sources = [name for name, is_given in given_sources.items() if is_given]
    if len(sources) != 1:
        do = "give one of DATA, --from RUN and --from_solutions"
        raise InvalidInput("transcripts", got=" and ".join(sources) or "nothing", do=do)
    useless = ["--min_reward"] * (min_reward is not None and from_run is None)
    if not from_solutions:
        typed = {key.partition(".")[0] for key in settings.values}
        useless += ["--n"] * (number is not None)
        useless += [f"--{name}" for name in ("taskset", *NOT_FOR_OTHER_TASKSETS) if name in typed]
    for name in useless:
        raise InvalidInput(name, got=f"it and {sources[0]}", do=f"leave it out: it has no effect with {sources[0]}")
    from agent_r1.tasksets.transcripts import make_taskset, read_transcripts
    from agent_r1.training.sft import attempts_of_run, sft_layers, solutions_of, without

    source: Mapping[str, Any] = {}
    if file is not None:
        transcripts = read_transcripts(file)
    elif from_run is not None:
        folder = find_run(from_run)
        source = config_of_run(folder).values
        transcripts = attempts_of_run(folder, 1.0 if min_reward is None else min_reward)
    else:
        solved = open_taskset(given.taskset, given, given.model)
        source, transcripts = solved.recipe, solutions_of(solved, number or 200)
        layers = [Layer(one.source, without(one.values, NOT_FOR_OTHER_TASKSETS)) for one in layers]
    taskset = make_taskset(transcripts)
    kept = {key: value for key, value in source.items() if key.partition(".")[0] in FROM_TASKSET}
    layers = [*sft_layers(layers, taskset, epochs), Layer("settings of the transcripts' source", kept)]
    config = resolve_config(TrainConfig, layers, taskset)
    splits = ", ".join(f"{split} {len(taskset.tasks(split))}" for split in ("train", taskset.validation) if split)
    progress.print_line(f"{len(transcripts)} transcripts ({splits})")
    _train_and_show(config, taskset, progress, None, as_json, dry_run=dry_run)


@click.command(cls=SettingsCommand, config=TrainConfig, common=COMMON)
@file_argument
@config_option
@json_option
@quiet_option
def smoke(file: Path | None, settings: Layer, config_file: Path | None, as_json: bool, quiet: bool) -> None:
    """Check a machine or a cluster before a long run, with the settings of the run.

    The services of the run are started, a few attempts are sampled and trained on, and weights are published. No run is
    written. The checks stop at the first failure.
    """
    progress = progress_of(quiet)
    config, taskset = _open(file, with_file(settings, config_file), progress)
    from agent_r1.training.smoke import smoke

    results = smoke(config, taskset, warn_unsandboxed(taskset, progress))
    failed = next((result for result in results if not result.passed), None)
    data = {"passed": failed is None, "first_failure": None if failed is None else failed.name}
    table = Table("check", "outcome", "detail", box=box.SIMPLE_HEAD)
    for one in results:
        table.add_row(*map(Text, (one.name, "passed" if one.passed else "failed", one.detail)))
    show(as_json, {**data, "checks": [asdict(result) for result in results], **sandbox_json(taskset)}, table)
    if failed is not None:
        raise AgentR1Error(f"{failed.name} failed: {failed.detail}")


def _open(file: Path | None, layers: list[Layer], progress: Progress) -> tuple[TrainConfig, TaskSet]:
    # Report invalid settings before anything is built or torch is imported.
    config = given = resolve(TrainConfig, layers, build=False)
    named = named_run(given.model)
    if named is not None:
        folder, own = named[0], config_of_run(named[0])
        taskset_of_run = resolve(TrainConfig, [own], build=False).taskset
        chosen = given.taskset if "taskset" in given.model_fields_set else taskset_of_run
        if taskset_of_run == chosen == TRANSCRIPTS and file is None:
            raise _needs_taskset(folder)
        if (chosen if file is None else file.stem) == taskset_of_run:
            layers = [*layers, _of_parent(own, layers)]
            config = resolve(TrainConfig, layers, build=False)
            progress.print_line(f"settings that are not given are those of {folder}")
        else:
            progress.print_line(f"the settings of {folder} are not used: they are for its task set, {taskset_of_run}")
        if file is None:
            require_file(folder, config.taskset)
    taskset = open_taskset(config.taskset, config, given.model) if file is None else open_file(file, given, given.model)
    resolved = resolve_config(TrainConfig, layers, taskset)
    note_disputed(taskset, settings_of(TrainConfig, layers), progress)
    return resolved, taskset


def _needs_taskset(folder: Path) -> InvalidInput:
    do = "name the task set in which the model acts, or give FILE.py"
    return InvalidInput("--taskset", got=f"none, and {folder} learned from transcripts", do=do)


def _of_parent(own: Layer, layers: list[Layer]) -> Layer:
    # The settings of a run from which another one branches. Only the user can choose to train without a sandbox.
    left_out = {"run", "model", "algorithm"}
    kept = {key: value for key, value in own.values.items() if key not in left_out and (key, value) != NO_SANDBOX}
    algorithm = own.values["algorithm"]
    if settings_of(TrainConfig, layers).get("algorithm", algorithm["name"]) == algorithm["name"]:
        # A correction that is None was not chosen: whether one is needed depends on the data types.
        kept["algorithm"] = {key: value for key, value in algorithm.items() if (key, value) != ("correction", None)}
    return Layer(own.source, kept)


def _open_run(file: Path | None, layers: list[Layer]) -> tuple[TrainConfig, TaskSet]:
    config = resolve_resume_config(layers)
    if file is not None:
        return config, load_task_file(file, config.model)
    if not config.acts:
        from agent_r1.tasksets.transcripts import open_transcripts

        return config, open_transcripts(run_folder(config.run))
    require_file(run_folder(config.run), config.taskset)
    return config, open_taskset(config.taskset, config, config.model)


def require_file(folder: Path, taskset: str) -> None:
    """Raise InvalidInput, which asks for a file, if the task set of a run is not built in."""
    if not agent_r1.tasksets.is_available(taskset):
        with closing(RunReader(folder)) as reader:
            file = read_file(reader)
        named = "" if file is None else f", {path_argument(file)}"
        do = f"give the file that the run was started with{named}, which defines {taskset!r}"
        raise InvalidInput("FILE.py", got="none", do=do)


@click.command("eval", cls=SettingsCommand, config=EvalConfig, common=COMMON)
@file_argument
@config_option
@click.option("--tasks", is_flag=True, help="Also print the result of each task; with --json, rewards and answers.")
@json_option
@quiet_option
def evaluate(
    file: Path | None, settings: Layer, config_file: Path | None, tasks: bool, as_json: bool, quiet: bool
) -> None:
    """Compare a model, a folder or a run with the baselines, and with models behind an API, in a table.

    The file of --config can be a configuration for training. Settings that only training has are ignored.
    """
    layers, trained = with_file(settings, config_file), None
    config = given = resolve(EvalConfig, layers, TrainConfig)
    named, progress = named_run(given.model), progress_of(quiet)
    if named is not None:
        folder, own = named[0], config_of_run(named[0])
        trained = resolve(TrainConfig, [own], build=False)
        other_taskset = "taskset" in given.model_fields_set and given.taskset != trained.taskset
        if trained.taskset == TRANSCRIPTS and not other_taskset and file is None:
            raise _needs_taskset(folder)
        layers.append(_for_evaluation(own, other_taskset))
        config = resolve(EvalConfig, layers, TrainConfig)
        if file is None and not other_taskset:
            require_file(folder, trained.taskset)
    if file is None:
        taskset = open_taskset(config.taskset, config, config.model)
        taskset = with_unseen_questions(taskset, config, trained, progress)
    else:
        taskset = open_file(file, given, config.model)
    config = resolve_config(EvalConfig, layers, taskset)
    from agent_r1.training.evaluate import evaluate

    table = evaluate(config, taskset, warn_unsandboxed(taskset, progress))
    by_task = {"tasks": [asdict(one) for one in table.tasks]} if tasks else {}
    shown = Group(render_table(table), render_tasks(table)) if tasks else render_table(table)
    show(as_json, table_json(table) | sandbox_json(taskset) | by_task, shown)


def config_of_run(folder: Path) -> Layer:
    with closing(RunReader(folder)) as reader:
        return Layer(f"configuration of {folder}", reader.config())


def _for_evaluation(own: Layer, other_taskset: bool) -> Layer:
    # Only the user can choose to evaluate without a sandbox, and to pay for the attempts of pass@k. A training without
    # evaluations has evaluate_n 0.
    left_out = {"evaluate_n", "pass_k", "pass_attempts", *(NOT_FOR_OTHER_TASKSETS if other_taskset else ())}
    kept = {key: value for key, value in own.values.items() if key not in left_out and (key, value) != NO_SANDBOX}
    return Layer(own.source, kept)


@click.command("train-critic", cls=SettingsCommand, config=CriticConfig)
@config_option
@json_option
@quiet_option
def train_critic(settings: Layer, config_file: Path | None, as_json: bool, quiet: bool) -> None:
    """Train a critic on the recorded attempts of a run, for value-guided decoding.

    Some tasks are held out. On the attempts at these tasks, the errors of the critic are compared with the errors of a
    constant prediction, the mean return.
    """
    config = resolve(CriticConfig, with_file(settings, config_file))
    run = find_run(config.run)
    from agent_r1.training.train_critic import train_critic

    report = train_critic(run, config, progress_of(quiet))
    rows = {
        "critic": report.folder,
        "trained on": f"{report.attempts} attempts at {report.tasks} tasks",
        "held out": f"{report.held_out_attempts} attempts at {report.held_out_tasks} tasks",
    }
    for name, fit in (("all states", report.all_states), ("after actions", report.after_actions)):
        error = f"squared error {fit.error:.4f} (mean return: {fit.mean_error:.4f})"
        rows[name] = f"explained variance {fit.explained_variance:z.2f}, {error}, {fit.states} states"
    show(as_json, asdict(report), columns(rows))


@click.command("train-reward", cls=SettingsCommand, config=RewardModelConfig)
@click.argument("runs", nargs=-1, required=True)
@config_option
@json_option
@quiet_option
def train_reward(runs: tuple[str, ...], settings: Layer, config_file: Any, as_json: bool, quiet: bool) -> None:
    """Train a reward model on the attempts of RUNS, and evaluate it on tasks that it was not trained on.

    The reward model reads whole attempts, and predicts a recorded reward. A run uses the reward model with
    --extra_rewards.NAME FOLDER.
    """
    config = resolve(RewardModelConfig, with_file(settings, config_file))
    folders = [find_run(run) for run in runs]
    from agent_r1.reward_models.train import train_reward_model

    report = train_reward_model(folders, config, progress_of(quiet).print_line)
    show(as_json, _to_json(report), _render(report))


def _to_json(report: RewardModelReport) -> dict[str, Any]:
    from agent_r1.reward_models.evaluation import without_nan

    found: dict[str, Any] = without_nan({**asdict(report), "out": str(report.out)})
    return found


def _render(report: RewardModelReport) -> RenderableType:
    found = report.evaluation
    first = (
        f"{report.out}: trained on {report.training_traces:,} attempts at {report.training_tasks:,} tasks; held out: "
        f"{found.traces:,} attempts at {found.tasks:,} other tasks, {found.successes:.0%} successes"
    )
    if found.calibration_error is None:
        return Group(Text(first), _separations(found))
    last = f"expected calibration error {found.calibration_error:.3f}"
    return Group(Text(first), _separations(found), Text(last), _calibration(found))


def _separations(found: Evaluation) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("score", "AUC (95 % interval)", "AUC within tasks", "accuracy"):
        table.add_column(name, justify="left" if name == "score" else "right", no_wrap=True)
    table.add_row("reward model", *_cells(found.model), "-" if found.accuracy is None else f"{found.accuracy:.3f}")
    for name, separation in found.baselines.items():
        table.add_row(name, *_cells(separation), "")
    table.add_row("majority", "0.500", "0.500", f"{found.majority:.3f}")
    return table


def _cells(one: Separation) -> tuple[str, str]:
    within = "-" if math.isnan(one.within_tasks) else f"{one.within_tasks:.3f}"
    return f"{one.auc:.3f} ({one.low:.3f}-{one.high:.3f})", within


def _calibration(found: Evaluation) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("prediction", "successes", "attempts"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.bins:
        table.add_row(f"{one.prediction:.3f}", f"{one.successes:.3f}", f"{one.count:,}")
    return table

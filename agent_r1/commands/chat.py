"""The command ``chat``."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from agent_r1.commands.command import (
    EncodableText,
    FilePath,
    SettingsCommand,
    config_option,
    json_option,
    progress_of,
    show,
    with_file,
)
from agent_r1.commands.show import find_attempt
from agent_r1.commands.tasksets import open_file, open_taskset, warn_unsandboxed
from agent_r1.commands.training import COMMON, config_of_run, require_file
from agent_r1.config import Layer, resolve, setting_keys
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.store.folder import run_folder
from agent_r1.store.reader import AttemptSummary, RunReader
from agent_r1.store.saved_weights import find_weights, named_run
from agent_r1.training.config import RunConfig, TrainConfig, resolve_config

OF_THE_MODEL = ("max_tokens", "context", "engine", "tool_format", "tags", "device", "tf32", "threads", "seed")
"""The settings, and groups of settings, that determine how the model answers."""

OF_THE_TASK = ("taskset", "data", "corpus", "encoder", "sandbox")

_CHAT_KEYS = tuple(key for key in setting_keys(RunConfig) if key.partition(".")[0] in (*OF_THE_MODEL, *OF_THE_TASK))


@click.command(cls=SettingsCommand, config=RunConfig, keys=_CHAT_KEYS, common=COMMON)
@click.argument("model", metavar="RUN|MODEL")
@click.argument("file", required=False, metavar="[FILE.py]", type=FilePath())
@click.argument("attempt", required=False, type=EncodableText())
@click.option(
    "--temperature", type=click.FloatRange(0, 100), default=0.0, help="Sampling temperature; by default 0 (greedy)."
)
@click.option("--checkpoint", help="Weights of a run: best (by default), last, or the step of a checkpoint.")
@click.option("--split", help="Split of the task; by default the first evaluation split.")
@click.option("--number", type=click.IntRange(0), help="Index of the task in its split; by default 0.")
@config_option
@json_option
def chat(
    model: str,
    file: Path | None,
    attempt: str | None,
    temperature: float,
    checkpoint: str | None,
    split: str | None,
    number: int | None,
    settings: Layer,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Talk to a model in the terminal, or from a pipe. The model calls the tools of its task set.

    Give a RUN or a MODEL. A RUN has its own task set. If the run was started with a FILE.py, give this file too. A
    MODEL is a Hugging Face name or a folder, and has tools only with --taskset or FILE.py.

    The tools use the data of one task, and the question of the task is printed. With ATTEMPT, the task is the same as
    in this attempt of RUN. ATTEMPT is an id such as 3.0.0:style-a/7, the beginning of an id, or one of the words best,
    worst and failed. Without ATTEMPT, --split and --number choose the task.
    """
    if file is not None and file.suffix != ".py" and attempt is None:
        file, attempt = None, str(file)
    layers = with_file(settings, config_file)
    given = resolve(RunConfig, layers, TrainConfig)
    name, has_taskset, named = model, "taskset" in given.model_fields_set, named_run(model)
    for what, value in (("attempt", attempt), ("--checkpoint", checkpoint)):
        if value is not None and named is None:
            got = f"{value}, and {run_folder(model)} is no run"
            raise InvalidInput(what, got=got, do="give RUN, or leave it out")
    chosen: AttemptSummary | None = None
    if named is not None:
        folder, step = named
        with closing(RunReader(folder)) as reader:
            if attempt is not None:
                if split is not None or number is not None:
                    option = "--number" if split is None else "--split"
                    raise InvalidInput(
                        option, got=f"it and the attempt {attempt}", do="leave one out: both choose a task"
                    )
                chosen = find_attempt(folder, reader, attempt)
            name = str(find_weights(folder, reader, checkpoint or step).folder)
        own = config_of_run(folder)
        used = (*OF_THE_MODEL, *(() if has_taskset or file else OF_THE_TASK))
        kept = {key: own.values[key] for key in used if key in own.values}
        if kept.get("sandbox") == "none":
            del kept["sandbox"]  # only the user can choose to run code without a sandbox
        layers.append(Layer(own.source, kept))
        if file is None and not has_taskset:
            require_file(folder, str(kept.get("taskset")))
            has_taskset = True
    layers.insert(0, Layer("command line", {"model": name}))
    config = resolve(RunConfig, layers, TrainConfig)
    taskset: TaskSet | None = None
    if file is not None:
        taskset = open_file(file, given, name)
    elif has_taskset:
        taskset = open_taskset(config.taskset, config)
    from agent_r1.training import chat

    if taskset is not None:
        config = resolve_config(RunConfig, layers, taskset)
        if chosen is not None:
            split, number = chosen.split, _number_of_task(taskset, chosen)
        warn_unsandboxed(taskset, progress_of(False))
    console = Console(highlight=False)
    result = chat.chat(config, taskset, console, temperature=temperature, split=split or "", number=number or 0)
    show(as_json, result.to_json(), Text(""))


def _number_of_task(taskset: TaskSet, chosen: AttemptSummary) -> int:
    # Return the index of an attempt's task in its split. Raise InvalidInput if the task set does not have the task.
    name = chosen.attempt.task
    for index, task in enumerate(taskset.tasks(chosen.split)):
        if task.id == name:
            return index
    do = "give the task set of the run, with its data and seed"
    raise InvalidInput("attempt", got=f"its task {name}, which {taskset.name} has not in {chosen.split}", do=do)


GROUPS = ("context", "max_tokens", "tool_format", "device", "tf32", "threads", "tags", "engine")
"""Settings, and groups of settings, that a served model uses."""

_SERVE_KEYS = tuple(key for key in setting_keys(RunConfig) if key.partition(".")[0] in GROUPS)

DEFAULT_PORT = 8000
SHORTEST_KEY = 8


@click.command(cls=SettingsCommand, config=RunConfig, keys=_SERVE_KEYS, common=COMMON)
@click.argument("model", metavar="MODEL|RUN")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="Port; 0: any.")
@click.option(
    "--api_key",
    envvar="AGENT_R1_API_KEY",
    help=f"API key of the endpoint: at least {SHORTEST_KEY} printable ASCII characters. By default a new one is made.",
)
@config_option
@json_option
def serve(model: str, settings: Layer, port: int, api_key: str | None, config_file: Path | None, as_json: bool) -> None:
    """Serve a model for programs that use the client libraries of OpenAI or Anthropic, on this machine only.

    Give a MODEL or a RUN. A MODEL is a Hugging Face name or a folder. If a RUN is given, its trained model is served.
    """
    if api_key is not None and (len(api_key) < SHORTEST_KEY or not api_key.isascii() or not api_key.isprintable()):
        do = f"give at least {SHORTEST_KEY} printable ASCII characters"
        raise InvalidInput("api_key", got=f"{len(api_key)} characters", do=do)
    layers = with_file(settings, config_file)
    if (named := named_run(model)) is not None:
        own = config_of_run(named[0])
        layers.append(Layer(own.source, {key: value for key, value in own.values.items() if key in GROUPS}))
    config = resolve(RunConfig, [Layer("command line", {"model": model}), *layers], TrainConfig)
    from agent_r1.training.chat import serve

    def announce(base_url: str, key: str) -> None:
        shown = key if api_key is None else "the one that was given"
        text = f"{model} at {base_url}\nAPI key: {shown}\nstop with Ctrl-C"
        show(as_json, {"base_url": base_url, "api_key": key if api_key is None else None, "model": model}, text)
        sys.stdout.flush()

    serve(config, port, api_key, announce)

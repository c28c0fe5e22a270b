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
from agent_r1.commands.show_attempts import find_attempt
from agent_r1.commands.tasksets import open_file, open_taskset, warn_unsandboxed
from agent_r1.commands.training import config_of_run, require_file
from agent_r1.config import Layer, resolve, restrict, setting_keys
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.export.model import find_weights
from agent_r1.store.attempt_list import AttemptFilter, AttemptSummary
from agent_r1.store.folder import is_run, run_folder
from agent_r1.store.reader import RunReader
from agent_r1.training.config import ChatConfig, EvalConfig, TrainConfig, resolve_config

OF_THE_MODEL = ("max_tokens", "context", "engine", "tool_format", "tags", "device", "tf32", "threads", "seed")
"""The settings, and groups of settings, that determine how the model answers."""

OF_THE_TASK = ("taskset", "data", "corpus", "encoder", "sandbox")

_CHAT_KEYS = tuple(
    key
    for key in setting_keys(ChatConfig)
    if key.partition(".")[0] in (*OF_THE_MODEL, *OF_THE_TASK, "temperature", "checkpoint", "split", "number")
)


@click.command(cls=SettingsCommand, config=ChatConfig, keys=_CHAT_KEYS)
@click.argument("model", metavar="RUN|MODEL")
@click.argument("file", required=False, metavar="[FILE.py]", type=FilePath())
@click.argument("attempt", required=False, type=EncodableText())
@config_option
@json_option
def chat(
    model: str, file: Path | None, attempt: str | None, settings: Layer, config_file: Path | None, as_json: bool
) -> None:
    """Talk to a model in the terminal, or from a pipe. The model calls the tools of its task set.

    Give a RUN or a MODEL. A RUN has its own task set. If the run was started with a FILE.py, give this file too. A
    MODEL is a Hugging Face name or a folder, and has tools only with --taskset or FILE.py.

    The tools use the data of one task, and the question of the task is printed. With ATTEMPT, the task is the same as
    in this attempt of RUN. ATTEMPT is an id such as 3.0.0:style-a/7, the beginning of an id, or one of the words best,
    worst, failed, longest and last. Without ATTEMPT, --split and --number choose the task.
    """
    if file is not None and file.suffix != ".py" and attempt is None:
        file, attempt = None, str(file)
    layers = [restrict(layer, ChatConfig, TrainConfig) for layer in with_file(settings, config_file)]
    config = resolve(ChatConfig, layers)
    folder, name, has_taskset = run_folder(model), model, "taskset" in config.model_fields_set
    chosen = None if attempt is None else _find_attempt(folder, attempt, config)
    if is_run(folder):
        with closing(RunReader(folder)) as reader:
            name = str(find_weights(folder, reader, config.checkpoint).folder)
        own = config_of_run(folder)
        used = (*OF_THE_MODEL, *(() if has_taskset or file else OF_THE_TASK))
        kept = {key: own.values[key] for key in used if key in own.values}
        if kept.get("sandbox") == "none":
            del kept["sandbox"]  # only the user can choose to run code without a sandbox
        layers.append(restrict(Layer(own.source, kept), ChatConfig, TrainConfig))
        if file is None and not has_taskset:
            require_file(folder, str(kept.get("taskset")))
            has_taskset = True
    layers.insert(0, Layer("command line", {"model": name}))
    given, config = config, resolve(ChatConfig, layers)
    taskset: TaskSet | None = None
    if file is not None:
        taskset = open_file(file, given, name)
    elif has_taskset:
        taskset = open_taskset(config.taskset, config)
    from agent_r1.training import chat

    if taskset is not None:
        config = resolve_config(ChatConfig, layers, taskset)
        if chosen is not None:
            config = _with_task(config, taskset, chosen)
        warn_unsandboxed(taskset, progress_of(False))
    result = chat.chat(config, taskset, Console(highlight=False))
    show(as_json, result.to_json(), Text(""))


def _find_attempt(folder: Path, name: str, config: ChatConfig) -> AttemptSummary:
    """Return the attempt ``name`` of the run in ``folder``.

    Raise InvalidInput if there is no such run or attempt, or if ``config`` also sets ``split`` or ``number``.
    """
    if not is_run(folder):
        raise InvalidInput("attempt", got=f"{name}, and {folder} is no run", do="give RUN, or leave it out")
    for key in ("split", "number"):
        if key in config.model_fields_set:
            raise InvalidInput(f"--{key}", got=f"it and the attempt {name}", do="leave one out: both choose a task")
    with closing(RunReader(folder)) as reader:
        return find_attempt(folder, reader, name, AttemptFilter())


def _with_task(config: ChatConfig, taskset: TaskSet, chosen: AttemptSummary) -> ChatConfig:
    """Return ``config`` with the task of an attempt. Raise InvalidInput if the task set does not have the task."""
    name = chosen.attempt.task
    number = next((index for index, task in enumerate(taskset.tasks(chosen.split)) if task.id == name), None)
    if number is None:
        do = "give the task set of the run, with its data and seed"
        raise InvalidInput("attempt", got=f"its task {name}, which {taskset.name} has not in {chosen.split}", do=do)
    return config.model_copy(update={"split": chosen.split, "number": number})


GROUPS = ("context", "max_tokens", "tool_format", "device", "tf32", "threads", "tags", "engine")
"""Settings, and groups of settings, that a served model uses."""

_SERVE_KEYS = tuple(key for key in setting_keys(EvalConfig) if key.partition(".")[0] in GROUPS)

DEFAULT_PORT = 8000
SHORTEST_KEY = 8


@click.command(cls=SettingsCommand, config=EvalConfig, keys=_SERVE_KEYS)
@click.argument("model", metavar="MODEL|RUN")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="Port; 0: any.")
@click.option("--api_key", envvar="AGENT_R1_API_KEY", help="API key of the endpoint; by default a new one is printed.")
@config_option
@json_option
def serve(model: str, settings: Layer, port: int, api_key: str | None, config_file: Path | None, as_json: bool) -> None:
    """Serve a model for programs that use the client libraries of OpenAI or Anthropic, on this machine only.

    Give a MODEL or a RUN. A MODEL is a Hugging Face name or a folder. If a RUN is given, its trained model is served.
    """
    if api_key is not None and (len(api_key) < SHORTEST_KEY or not api_key.isascii() or not api_key.isprintable()):
        do = f"give at least {SHORTEST_KEY} printable ASCII characters"
        raise InvalidInput("api_key", got=f"{len(api_key)} characters", do=do)
    layers = [restrict(layer, EvalConfig, TrainConfig) for layer in with_file(settings, config_file)]
    if is_run(run_folder(model)):
        own = config_of_run(run_folder(model))
        used = {key: value for key, value in own.values.items() if key in GROUPS}
        layers.append(restrict(Layer(own.source, used), EvalConfig, TrainConfig))
    config = resolve(EvalConfig, [Layer("command line", {"model": model}), *layers])
    from agent_r1.training.chat import serve

    def announce(base_url: str, key: str) -> None:
        shown = key if api_key is None else "the one that was given"
        text = f"{model} at {base_url}\nAPI key: {shown}\nstop with Ctrl-C"
        show(as_json, {"base_url": base_url, "api_key": key if api_key is None else None, "model": model}, text)
        sys.stdout.flush()

    serve(config, port, api_key, announce)

"""The command ``serve``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agent_r1.commands.command import SettingsCommand, config_option, json_option, show, with_file
from agent_r1.commands.training import config_of_run
from agent_r1.config import Layer, resolve, restrict, setting_keys
from agent_r1.core.errors import InvalidInput
from agent_r1.store import is_run, run_folder
from agent_r1.training.config import EvalConfig, TrainConfig

GROUPS = ("context", "max_tokens", "tool_format", "device", "tf32", "threads", "tags", "engine")
"""Settings, and groups of settings, that a served model uses."""

KEYS = tuple(key for key in setting_keys(EvalConfig) if key.partition(".")[0] in GROUPS)

DEFAULT_PORT = 8000
SHORTEST_KEY = 8


@click.command(cls=SettingsCommand, config=EvalConfig, keys=KEYS)
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
    from agent_r1.training.serve import serve

    def announce(base_url: str, key: str) -> None:
        shown = key if api_key is None else "the one that was given"
        text = f"{model} at {base_url}\nAPI key: {shown}\nstop with Ctrl-C"
        show(as_json, {"base_url": base_url, "api_key": key if api_key is None else None, "model": model}, text)
        sys.stdout.flush()

    serve(config, port, api_key, announce)

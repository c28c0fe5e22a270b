"""The command ``serve-env``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agent_r1.commands.command import SettingsCommand, config_option, json_option, progress_of, show, with_file
from agent_r1.commands.tasksets import open_taskset, sandbox_json, warn_unsandboxed
from agent_r1.config import Layer, resolve
from agent_r1.training.worker_config import WorkerConfig


@click.command(cls=SettingsCommand, config=WorkerConfig)
@click.argument("taskset")
@click.option("--token", envvar="AGENT_R1_WORKER_TOKEN", default="", help="Token that runs must have.")
@config_option
@json_option
def serve_env(taskset: str, settings: Layer, token: str, config_file: Path | None, as_json: bool) -> None:
    """Serve the environments of a task set to runs on other machines. TASKSET is a name, or a FILE.py.

    This command starts a worker. A run uses the worker if --environment.workers lists the worker's address. Whoever has
    the token can run the tools.
    """
    config = resolve(WorkerConfig, with_file(settings, config_file))
    opened = open_taskset(taskset, config)
    warn_unsandboxed(opened, progress_of(as_json))
    from agent_r1.training.environment_workers import serve_environments
    from agent_r1.workers.protocol import WorkerDescription

    def announce(url: str, description: WorkerDescription) -> None:
        text = f"environments of {description.taskset} at {url}; stop with Ctrl-C or SIGTERM"
        show(as_json, {"url": url, **description.model_dump(), **sandbox_json(opened)}, text)
        sys.stdout.flush()

    serve_environments(config, opened, token, announce)

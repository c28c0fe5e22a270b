"""The command ``plan``."""

from __future__ import annotations

from pathlib import Path

import click

from agent_r1.commands.command import FilePath, SettingsCommand, config_option, json_option, show, with_file
from agent_r1.commands.training import config_of_run
from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.store import is_run, run_folder
from agent_r1.training.plan_config import PlanConfig

OF_GPUS = ("gpu", "gpus", "gpu_memory", "gpu_tflops", "gpu_bandwidth", "mfu")
OF_ATTEMPTS = ("prompt_tokens", "turns", "action_tokens", "result_tokens")
OF_RECORDED_RUNS = ("clock", "load")
"""Settings without an effect: of GPUs and attempts with a recorded run, of recorded runs without one."""


@click.command(cls=SettingsCommand, config=PlanConfig)
@click.argument("runs", nargs=-1, metavar="[RUN ..]", type=FilePath())
@config_option
@json_option
def plan(runs: tuple[Path, ...], settings: Layer, config_file: Path | None, as_json: bool) -> None:
    """Predict the memory and the step time of a run, on GPUs or on the machine of recorded runs.

    RUN is a run of the embedded engine that was recorded with --profile. The prediction begins with its settings and
    its attempts. Further runs, of other batch sizes, make its costs more precise.
    """
    layers = with_file(settings, config_file)
    folders = [run_folder(str(run)) for run in runs]
    for folder in folders:
        if not is_run(folder):
            raise InvalidInput("run", got=str(folder), do="give the name or the folder of a run")
    if folders:
        layers.append(config_of_run(folders[0]))
    config = resolve(PlanConfig, layers)
    for name in (*OF_GPUS, *OF_ATTEMPTS) if folders else OF_RECORDED_RUNS:
        if name in config.model_fields_set:
            do = "leave it out: a recorded run has its machine and its attempts" if folders else "give a recorded run"
            raise InvalidInput(name, got=config.model_dump(include={name})[name], do=do)
    if not config.model:
        do = "give --model: a name such as qwen2.5-7b, a folder, or a config.json"
        raise InvalidInput("model", got="nothing", do=do)
    from agent_r1.training.plan import plan_cluster, plan_recorded, render_plan
    from agent_r1.training.step_costs import read_run

    found = plan_recorded(config, [read_run(folder) for folder in folders]) if folders else plan_cluster(config)
    show(as_json, found.to_json(), render_plan(found))

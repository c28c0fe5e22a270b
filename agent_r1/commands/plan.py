"""The command ``plan``."""

from __future__ import annotations

from pathlib import Path

import click

from agent_r1.commands.command import FilePath, SettingsCommand, config_option, json_option, show, with_file
from agent_r1.commands.training import config_of_run
from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.store.folder import is_run, run_folder
from agent_r1.training.plan_config import PlanConfig

OF_GPUS = ("gpu", "gpus", "gpu_memory", "gpu_tflops", "gpu_bandwidth", "mfu")
"""Settings that describe the GPUs. If a recorded run is given without --gpu, the plan is for the machine of the run, so
all other settings of this list are refused."""
OF_ATTEMPTS = ("prompt_tokens", "turns", "action_tokens", "result_tokens")
"""Settings for the sizes of attempts. With a recorded run, these settings are refused, because the plan uses the
recorded attempts."""
OF_RECORDED_RUNS = ("clock", "load")
"""Settings that say how a plan uses the measured times of a recorded run. With --gpu, or without a recorded run, these
settings are refused, because the plan uses no measured times of engine and trainer."""


@click.command(cls=SettingsCommand, config=PlanConfig)
@click.argument("runs", nargs=-1, metavar="[RUN ..]", type=FilePath())
@config_option
@json_option
def plan(runs: tuple[Path, ...], settings: Layer, config_file: Path | None, as_json: bool) -> None:
    """Predict the step time of a planned run, on GPUs or on the machine where other runs were recorded. For GPUs, also
    predict the memory.

    RUN is the name or the folder of a recorded run. The prediction uses the attempts, the times of the environments and
    the settings of the first RUN. Settings that you give replace the settings of the first RUN.

    With --gpu, the times of engine and trainer are computed for a GPU. Without --gpu, these times are taken from the
    profiles of all RUNs. In this case, each RUN must have used the embedded engine and --profile. Several RUNs with
    different batch sizes make the prediction more precise.
    """
    layers = with_file(settings, config_file)
    folders = [run_folder(str(run)) for run in runs]
    for folder in folders:
        if not is_run(folder):
            raise InvalidInput("run", got=str(folder), do="give the name or the folder of a run")
    if folders:
        layers.append(config_of_run(folders[0]))
    config = resolve(PlanConfig, layers)
    for name, why in _without_effect(bool(folders), bool(config.gpu)).items():
        if name in config.model_fields_set:
            raise InvalidInput(name, got=config.model_dump(include={name})[name], do=why)
    if len(folders) > 1 and config.gpu:
        do = "give one run with --gpu: only its attempts are used"
        raise InvalidInput("runs", got=", ".join(map(str, folders)), do=do)
    if not config.model:
        do = "give --model: a name such as qwen2.5-7b, a folder, or a config.json"
        raise InvalidInput("model", got="nothing", do=do)
    from agent_r1.training.plan import plan_cluster, plan_recorded, render_plan
    from agent_r1.training.step_costs import read_profiled_run, read_run

    if folders and not config.gpu:
        found = plan_recorded(config, [read_profiled_run(folder) for folder in folders])
    else:
        found = plan_cluster(config, [group for folder in folders for group in read_run(folder).groups])
    show(as_json, found.to_json(), render_plan(found))


def _without_effect(has_run: bool, has_gpu: bool) -> dict[str, str]:
    found = dict[str, str]()
    if has_run:
        found |= dict.fromkeys(OF_ATTEMPTS, "leave it out: the attempts are those of the recorded run")
    if has_run and not has_gpu:
        found |= dict.fromkeys(OF_GPUS, "give --gpu too, or leave it out: the recorded run has its machine")
    if has_gpu or not has_run:
        found |= dict.fromkeys(OF_RECORDED_RUNS, "leave out --gpu, and give a recorded run")
    return found

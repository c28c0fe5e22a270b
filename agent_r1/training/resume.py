"""The configuration of a resumed run: the stored configuration, with new values of some settings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path

from agent_r1.config import Layer, resolve, settings_of
from agent_r1.core.errors import InvalidInput
from agent_r1.core.redaction import flatten
from agent_r1.inference.config import EngineConfig, VllmConfig
from agent_r1.store.folder import is_run, path_argument, run_argument, run_folder
from agent_r1.store.manifest import MODEL, checkpoint_step, list_checkpoints
from agent_r1.store.reader import RunReader, read_file
from agent_r1.store.saved_weights import ADAPTER_CONFIG
from agent_r1.tasksets import is_available
from agent_r1.training.config import MonitorConfig, PlacementConfig, TrainConfig
from agent_r1.workers.protocol import EnvironmentConfig

CHANGEABLE = (
    *("run", "steps", "stop_after", "checkpoint_every", "checkpoint_keep", "pass_k", "pass_attempts", "splits"),
    *("record_tokens", "track", "profile"),
    *("device", "tf32", "threads", "concurrency", "episode_seconds", "score_seconds"),
    *("data", "corpus", "model", "own_code"),
    *("trainer.micro_tokens", "trainer.ranks", "trainer.rank_restarts", "trainer.schedule.steps"),
    *(f"engine.{name}" for name in EngineConfig.model_fields if name not in ("dtype", "vllm")),
    *(f"engine.vllm.{name}" for name in VllmConfig.model_fields),
    *(f"environment.{name}" for name in EnvironmentConfig.model_fields),
    *(f"placement.{name}" for name in PlacementConfig.model_fields),
    *(f"monitor.{name}" for name in MonitorConfig.model_fields),
)
"""The settings that may change when a run is resumed.

``trainer.micro_tokens`` and ``trainer.ranks`` change results only by rounding. ``data``, ``corpus`` and ``model`` may
name another place, but the contents must be unchanged.
"""

DECODE_STEP = "decode_step"
"""The kind of an event that names the implementation of the decode steps. Without such an event, it is PyTorch."""

TORCH = "torch"


def resolve_resume_config(layers: Sequence[Layer]) -> TrainConfig:
    """Return the stored configuration of a run, with the new values in ``layers``.

    If PyTorch computed the decode steps of the run so far, ``engine.decode_step`` "auto" becomes "torch", because a
    different implementation would change the rounding errors.
    """
    name = resolve(TrainConfig, layers, build=False).run
    if not name:
        raise InvalidInput("resume", got="no run", do="name the run to continue, as --run NAME")
    folder = run_folder(name)
    if not is_run(folder):
        raise InvalidInput("resume", got=f"{folder}, which holds no run", do="leave resume out to start one")
    with closing(RunReader(folder)) as reader:
        own, complete = Layer(f"configuration of {folder}", reader.config()), reader.is_complete()
        taken, file, decode_step = reader.last_step(), read_file(reader), recorded_decode_step(reader)
    before = resolve(TrainConfig, [own])
    # Another algorithm with the parameters of the run's own would give a confusing error below.
    algorithm = settings_of(TrainConfig, layers).get("algorithm", before.algorithm.name)
    if algorithm != before.algorithm.name:
        raise _unchangeable(folder, "algorithm", algorithm, before.algorithm.name)
    if settings_of(TrainConfig, layers).get("placement.launcher") == "processes":  # the others are Ray's
        own = replace(own, values={key: value for key, value in own.values.items() if key != "placement"})
    after = resolve(TrainConfig, [*layers, own])
    _refuse_changes(folder, before, after)
    if after.steps < taken:
        do = f"give at least the {taken} that {folder} took, or leave it out"
        raise InvalidInput("steps", got=after.steps, do=do)
    after.trainer.schedule.check_steps(after.steps)
    if complete and (after.steps, after.stop_after) == (before.steps, before.stop_after):
        got = f"{folder}, which is complete: it took its {taken} step{'s' * (taken != 1)}"
        do = f"give more --steps{' and another --stop_after' * (taken < before.steps)} to continue"
        if file is not None or is_available(before.taskset):
            of_file = "" if file is None else f"{path_argument(file)} "
            do += f"; 'agent-r1 eval {of_file}--model {name}' gives its table again"
        raise InvalidInput("resume", got=got, do=do)
    if after.engine.decode_step != "auto" or after.engine.backend != "embedded" or decode_step != TORCH or not taken:
        return after
    return after.model_copy(update={"engine": after.engine.model_copy(update={"decode_step": TORCH})})


def recorded_decode_step(reader: RunReader) -> str:
    """Return the name of the implementation that computed the last decode steps of a run."""
    steps = [event.detail for event in reader.events() if event.kind == DECODE_STEP]
    return steps[-1] if steps else TORCH


def _refuse_changes(folder: Path, before: TrainConfig, after: TrainConfig) -> None:
    own, given = dict(flatten(before.model_dump(mode="json"))), dict(flatten(after.model_dump(mode="json")))
    for key, value in given.items():
        if key not in CHANGEABLE and (key not in own or own[key] != value):
            raise _unchangeable(folder, key, value, own.get(key, "none"))


def _unchangeable(folder: Path, key: str, value: object, own: object) -> InvalidInput:
    do = f"leave it out: {folder} continues with {own}; or {_branch(folder, key, value)}"
    return InvalidInput(key, got=value, do=do)


def _branch(folder: Path, key: str, value: object) -> str:
    # The command, or the Python call, that starts a new run with the newest weights of this one and another setting.
    with closing(RunReader(folder)) as reader:
        file, taskset = read_file(reader), str(reader.config()["taskset"])
    # No run can begin with the adapter that a checkpoint of LoRA holds.
    whole = (checkpoint for checkpoint in list_checkpoints(folder) if not (checkpoint / ADAPTER_CONFIG).is_file())
    newest = next((f"@{checkpoint_step(checkpoint)}" for checkpoint in whole), "")
    if not newest and not (folder / MODEL).is_dir():
        return "start a new run to change it"
    new = next(name for n in count(2) if not (name := folder.with_name(f"{folder.name}-{n}")).exists())
    if file is None and not is_available(taskset):
        return f"branch: agent_r1.train(env, tasks, model={str(folder) + newest!r}, run={str(new)!r}, ..)"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    of_file = "" if file is None else f"{path_argument(file)} "
    command = f"agent-r1 train {of_file}--model {run_argument(folder)}{newest} --run {run_argument(new)}"
    return f"branch: {command} --{key} {shlex.quote(text)}"

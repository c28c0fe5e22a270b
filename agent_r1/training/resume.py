"""What a run is resumed with: the configuration it has, of which little may change. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.store import RunReader, is_run, run_folder
from agent_r1.training.config import TrainConfig
from agent_r1.training.monitor.config import DoctorConfig

MAY_CHANGE = (
    *("run", "steps", "checkpoint_every", "checkpoint_keep", "pass_k", "pass_attempts", "splits"),
    *("device", "threads", "concurrency", "episode_seconds", "score_seconds"),
    *("data", "corpus", "model"),
    *("trainer.micro_tokens", *(f"doctor.{name}" for name in DoctorConfig.model_fields)),
)
"""What may differ from the run's own configuration: where the run lies, how far it goes (no less than it went),
what is saved and reported, what fits it to a machine (other ``trainer.micro_tokens`` give the same up to rounding),
when it is stopped, and where its files lie: what is in them is compared (:mod:`agent_r1.training.data_fingerprint`, and the weights
of version 0)."""


def resumed(layers: Sequence[Layer]) -> TrainConfig:
    """The configuration to resume a run with: the run's own, and over it what ``layers`` say and may change.

    Raises InvalidInput where they name no run, there is none, it is complete, or they contradict what it has.
    """
    name = resolve(TrainConfig, layers).run
    if not name:
        raise InvalidInput("resume", got="no run", do="name the run to go on with, as --run NAME")
    folder = run_folder(name)
    if not is_run(folder):
        raise InvalidInput("resume", got=f"{folder}, which holds no run", do="leave resume out to begin one")
    with closing(RunReader(folder)) as reader:
        own, complete = Layer(f"configuration of {folder}", reader.config()), reader.completed()
        taken = reader.last_step()
    before, after = resolve(TrainConfig, [own]), resolve(TrainConfig, [*layers, own])
    _refuse_changes(folder, before, after)
    if after.steps < taken:
        do = f"give at least the {taken} that {folder} took, or leave it out"
        raise InvalidInput("steps", got=after.steps, do=do)
    if complete and after.steps == before.steps:
        got = f"{folder}, which is complete: it took its {before.steps} steps"
        do = f"give more --steps to go on; 'agent-r1 eval --model {name}' gives its table again"
        raise InvalidInput("resume", got=got, do=do)
    return after


def _refuse_changes(folder: Path, before: TrainConfig, after: TrainConfig) -> None:
    own, asked = dict(_flat(before.model_dump(mode="json"))), dict(_flat(after.model_dump(mode="json")))
    for key, value in asked.items():
        if key not in MAY_CHANGE and (key not in own or own[key] != value):
            do = f"leave it out: {folder} goes on with {own.get(key, 'none')}; begin a new run to change it"
            raise InvalidInput(key, got=value, do=do)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted key."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value

"""Runs that are written event by event, without training, and the attempts of a run."""

import asyncio
from contextlib import closing
from pathlib import Path

from agent_r1.core.events import Event
from agent_r1.core.files import atomic_replace_dir
from agent_r1.store.manifest import ModelFingerprint, RowsDigest, write_manifest
from agent_r1.store.reader import RunReader
from agent_r1.store.writer import RunWriter


def record_all(writer: RunWriter, *batches: list[Event]) -> None:
    """Record batches of events, each in one call."""
    for events in batches:
        asyncio.run(writer.record(*events))


def save(run: Path, name: str, weights: str, rows: RowsDigest | None) -> None:
    """Save a folder of a run with a manifest, as a saved model or checkpoint has."""
    with atomic_replace_dir(run / name) as temporary:
        (temporary / "model.safetensors").write_text(weights, "utf-8")
        write_manifest(temporary, ModelFingerprint("a model", "a tokenizer", "a template", weights), rows)


def first_attempts(folder: Path) -> list[object]:
    """Return rewards, tokens and log-probabilities of the attempts of a run's first step."""
    with closing(RunReader(folder)) as reader:
        first = {fate.attempt for fate in reader.fates() if fate.step == 1}
        return [
            (dict(trajectory.rewards), [(turn.action_ids, turn.logprobs) for turn in trajectory.turns])
            for trajectory in reader.trajectories()
            if trajectory.attempt in first
        ]

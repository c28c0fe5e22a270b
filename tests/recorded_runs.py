"""Runs that are written event by event, without training."""

import asyncio
from pathlib import Path

from agent_r1.core.events import Event
from agent_r1.store import RunWriter
from agent_r1.store.atomic_fs import atomic_replace_dir
from agent_r1.store.ledger import Seal
from agent_r1.store.manifest import ModelFingerprint, write_manifest


def record_all(writer: RunWriter, *batches: list[Event]) -> None:
    """Record batches of events, each in one call."""
    for events in batches:
        asyncio.run(writer.record(*events))


def save(run: Path, name: str, weights: str, seal: Seal | None) -> None:
    """Save a folder of a run with a manifest, as a saved model or checkpoint has."""
    with atomic_replace_dir(run / name) as temporary:
        (temporary / "model.safetensors").write_text(weights)
        write_manifest(temporary, ModelFingerprint("a model", "a tokenizer", "a template", weights), seal)

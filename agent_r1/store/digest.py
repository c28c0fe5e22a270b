"""The canonical digest of a run: equal runs have equal digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Set
from typing import Any

from agent_r1.core.trajectory import Rewards, Trajectory, Turn
from agent_r1.store.codec import encode_version_spans
from agent_r1.store.reader import RunReader


def run_digest(reader: RunReader) -> str:
    """Return the sha256 of everything that an exact repetition of the run reproduces.

    Covered: attempts with their policy versions, tokens, log-probabilities and rewards; in which step each attempt was
    trained or dropped, with the sum of its advantages; metrics; the checksums of all weights.

    Not covered: times, the reasons why attempts failed or were dropped, log events, the run's name and configuration,
    rewards of weight 0, superseded rows (which became invalid when the run was resumed), and the order in which
    attempts ended.

    If training is deterministic, a run that was stopped and resumed has the same digest as a run without a stop.
    """
    total = hashlib.sha256()
    ignored = frozenset(name for name, weight in reader.config().get("reward_weights", {}).items() if weight == 0)
    for entry in _entries(reader, ignored):
        # repr of a float64 is exact; one entry per line is unambiguous, because JSON text has no raw newline
        total.update(json.dumps(entry, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n")
    return total.hexdigest()


def _entries(reader: RunReader, ignored: Set[str]) -> Iterator[list[Any]]:
    ignored_means = {f"reward/{name}" for name in ignored}
    fates = {fate.attempt: [fate.fate, fate.step, fate.credit] for fate in reader.fates()}
    for event in sorted(reader.attempts(), key=lambda event: (event.attempt.sort_key, event.attempt.task)):
        attempt = event.attempt
        yield ["attempt", attempt.task, attempt.sort_key, event.split, event.version, fates.get(attempt)]
        trajectory = reader.trajectory(attempt)
        if trajectory is not None:
            yield from _trajectory_entries(trajectory, ignored)
    for version in reader.versions():
        yield ["version", version.number, version.step, version.checksum]
    for step in reader.reproducible_metrics():
        yield ["metrics", step.step, {key: step.values[key] for key in step.values if key not in ignored_means}]


def _trajectory_entries(trajectory: Trajectory, ignored: Set[str]) -> Iterator[list[Any]]:
    rewards = _without(trajectory.rewards, ignored)
    answer = [] if trajectory.answer is None else [trajectory.answer]
    yield ["outcome", trajectory.task_id, trajectory.status, trajectory.truncated, rewards, *answer]
    yield from (["turn", *_turn_fields(turn, ignored)] for turn in trajectory.turns)


def _turn_fields(turn: Turn, ignored: Set[str]) -> Iterator[Any]:
    yield from (turn.index, turn.parent, turn.kind, turn.finish_reason)
    yield from (turn.new_ids, turn.action_ids, turn.logprobs, encode_version_spans(turn.version_spans))
    if turn.media:  # the placeholder tokens of two images can be equal
        yield [media.image.sha256 for media in turn.media]
    yield _without(turn.rewards, ignored)
    for end, rewards in zip(turn.call_ends, turn.call_rewards, strict=False):
        if counted := _without(rewards, ignored):
            yield [end, counted]


def _without(rewards: Rewards, ignored: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in rewards.items() if name not in ignored}

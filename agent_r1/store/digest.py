"""The canonical digest of a run: two runs are the same when theirs are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Set
from typing import Any

from agent_r1.core.events import AttemptFate
from agent_r1.core.trajectory import Rewards, Trajectory, Turn
from agent_r1.store.codec import version_spans_to_json
from agent_r1.store.reader import RunReader


def run_digest(reader: RunReader) -> str:
    """sha256 over what was lived, learned and made, in the order of groups, whatever the run is called.

    Covered are attempts, the versions of their weights, tokens, log-probabilities, rewards, fates, credit, metrics
    (the loss among them) and the digests of all weights. Not covered: clocks, words for people (reasons, events),
    the run's name and configuration, rewards of weight 0, and what was superseded: a run that was resumed has the
    digest it would have had without the stop, where training repeats exactly.
    """
    total = hashlib.sha256()
    ignored = frozenset(name for name, weight in reader.config().get("reward_weights", {}).items() if weight == 0)
    for entry in _entries(reader, ignored):
        # repr of a float64 is exact; one entry per line, because JSON has no newline of its own
        total.update(json.dumps(entry, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n")
    return total.hexdigest()


def _entries(reader: RunReader, ignored: Set[str]) -> Iterator[list[Any]]:
    fates = {fate.attempt: fate for fate in reader.fates()}
    started = sorted(reader.dispatched(), key=lambda event: (event.attempt.order, event.attempt.task))
    for event in started:
        attempt = event.attempt
        yield ["attempt", attempt.task, attempt.order, event.split, event.version, _fate(fates.get(attempt))]
        lived = reader.trajectory(attempt)
        if lived is not None:
            yield from _lived(lived, ignored)
    for made in reader.versions():
        yield ["version", made.version, made.step, made.digest]
    for measured in reader.exact_metrics():
        yield ["metrics", measured.step, dict(measured.values)]


def _fate(fate: AttemptFate | None) -> list[Any] | None:
    return None if fate is None else [fate.fate, fate.step, fate.credit]


def _lived(trajectory: Trajectory, ignored: Set[str]) -> Iterator[list[Any]]:
    how = trajectory.status, trajectory.truncated
    yield ["outcome", trajectory.task_id, *how, _counted(trajectory.rewards, ignored)]
    yield from (["turn", *_turn(turn, ignored)] for turn in trajectory.turns)


def _counted(rewards: Rewards, ignored: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in rewards.items() if name not in ignored}


def _turn(turn: Turn, ignored: Set[str]) -> Iterator[Any]:
    yield from (turn.index, turn.parent, turn.role, turn.kind, turn.finish_reason)
    yield from (turn.new_ids, turn.action_ids, turn.logprobs, version_spans_to_json(turn.version_spans))
    yield _counted(turn.rewards, ignored)
    for end, rewards in zip(turn.call_ends, turn.call_rewards, strict=False):
        if counted := _counted(rewards, ignored):
            yield [end, counted]

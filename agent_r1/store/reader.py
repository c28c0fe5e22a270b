"""Reading a run back, finished, interrupted, or still being written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.events import AttemptFate, AttemptStarted, LogEvent, PolicyPublished, StepMetrics
from agent_r1.core.trajectory import Status, Trajectory, Turn
from agent_r1.store.codec import to_action, to_messages, to_result, version_spans_from_json
from agent_r1.store.compression import Tokens, unpack_document
from agent_r1.store.file_invariants import check_checkpoint, last_saved, last_step
from agent_r1.store.folder import DATABASE
from agent_r1.store.invariants import COMPLETED
from agent_r1.store.manifest import Manifest
from agent_r1.store.rows import attempt_key, to_number, to_reward
from agent_r1.store.schema import open_reader

ATTEMPT = "attempts.run, attempts.task, attempts.group_serial, attempts.member, attempts.retry"
LIVED = (
    f"attempts.id, {ATTEMPT}, task_id, status, truncated, outcomes.reason, seconds, start"
    " FROM standing_attempts AS attempts JOIN outcomes ON attempt_id = attempts.id"
)
Place = tuple[int | None, int | None]
"""The turn and the call that a reward belongs to; None, None: the whole trajectory."""
RewardsByPlace = Mapping[Place, Mapping[str, Any]]


class RunReader:
    """What a run's ledger holds, as the core types that were recorded.

    It reads the newest lineage: what was superseded when the run was resumed is left out. Attempts,
    trajectories and fates come in the order of dispatch. Raises InvalidInput where ``folder``
    holds no run that this version can read.
    """

    def __init__(self, folder: Path) -> None:
        self._connection = open_reader(folder / DATABASE)

    def close(self) -> None:
        self._connection.close()

    def config(self) -> dict[str, Any]:
        """The resolved configuration of the newest lineage."""
        sql = "SELECT config FROM lineages ORDER BY lineage DESC LIMIT 1"
        return json.loads(self._connection.execute(sql).fetchone()[0])

    def completed(self) -> bool:
        """Whether the run came to its end, and was not resumed since."""
        return bool(self._connection.execute(f"SELECT {COMPLETED}").fetchone()[0])

    def last_step(self) -> int:
        """The last step that was measured; 0 where none was."""
        return last_step(self._connection)

    def last_saved(self) -> int | None:
        """The step of the last checkpoint that is known to have been saved; None where none is."""
        return last_saved(self._connection)

    def check_checkpoint(self, checkpoint: Path) -> Manifest:
        """The manifest of a checkpoint that is whole and of this run. Raises Damaged, or InvalidInput where another
        agent-r1 wrote it."""
        return check_checkpoint(self._connection, checkpoint)

    def dispatched(self) -> Iterator[AttemptStarted]:
        """Every attempt that was started."""
        sql = f"SELECT {ATTEMPT}, split, version FROM standing_attempts AS attempts ORDER BY id"
        for *attempt, split, version in self._rows(sql):
            yield AttemptStarted(AttemptId(*attempt), split, version)

    def trajectories(self, split: str | None = None) -> Iterator[Trajectory]:
        """Every attempt that ended; those of one split where it is named."""
        for row in self._rows(f"SELECT {LIVED} WHERE ?1 IS NULL OR split = ?1 ORDER BY id", split):
            yield self._trajectory(row)

    def trajectory(self, attempt: AttemptId) -> Trajectory | None:
        """The trajectory of an attempt, None where it did not end."""
        found = next(self._rows(f"SELECT {LIVED} WHERE attempt = ?", attempt_key(attempt)), None)
        return None if found is None else self._trajectory(found)

    def fates(self) -> Iterator[AttemptFate]:
        """What became of the attempts that met a fate."""
        columns = f"{ATTEMPT}, fate, step, reason, credit"
        sql = f"SELECT {columns} FROM standing_attempts AS attempts WHERE fate IS NOT NULL ORDER BY id"
        for *attempt, fate, step, reason, credit in self._rows(sql):
            yield AttemptFate(AttemptId(*attempt), fate, step, reason, None if credit is None else to_number(credit))

    def versions(self) -> Iterator[PolicyPublished]:
        """The weights that were made, in order."""
        for row in self._rows("SELECT version, step, digest FROM standing_versions ORDER BY version, lineage"):
            yield PolicyPublished(*row)

    def metrics(self) -> Iterator[StepMetrics]:
        """The metrics of each step and what it took, in the order of steps."""
        return self._measured("TRUE")

    def exact_metrics(self) -> Iterator[StepMetrics]:
        """The metrics of each step alone."""
        return self._measured("exact")

    def events(self) -> Iterator[LogEvent]:
        """Whatever else happened, in order."""
        for kind, detail in self._rows("SELECT kind, detail FROM events ORDER BY id"):
            yield LogEvent(kind, detail)

    def _rows(self, sql: str, *parameters: Any) -> Iterator[tuple[Any, ...]]:
        return self._connection.execute(sql, parameters)

    def _measured(self, condition: str) -> Iterator[StepMetrics]:
        rows = self._rows(f"SELECT step, name, value FROM standing_metrics WHERE {condition} ORDER BY step, id")
        for step, measured in groupby(rows, key=itemgetter(0)):
            yield StepMetrics(step, {name: to_number(value) for _, name, value in measured})

    def _trajectory(self, row: tuple[Any, ...]) -> Trajectory:
        key, *attempt, task_id, status, truncated, reason, seconds, start = row
        rewards = self._rewards(key)
        return Trajectory(
            attempt=AttemptId(*attempt),
            task_id=task_id,
            turns=self._turns(key, rewards),
            status=Status(status),
            truncated=bool(truncated),
            rewards=rewards.get((None, None), {}),
            reason=reason,
            start=to_messages(unpack_document(start)),
            seconds=seconds,
        )

    def _rewards(self, key: int) -> RewardsByPlace:
        rewards: dict[Place, dict[str, Any]] = {}
        sql = "SELECT turn, call, name, value FROM rewards WHERE attempt_id = ? ORDER BY rowid"
        for turn, call, name, value in self._rows(sql, key):
            rewards.setdefault((turn, call), {})[name] = to_reward(value)
        return rewards

    def _turns(self, key: int, rewards: RewardsByPlace) -> tuple[Turn, ...]:
        columns = "turn, parent, tokens, stop, role, kind, said"
        rows = self._rows(f"SELECT {columns} FROM turns WHERE attempt_id = ? ORDER BY turn", key)
        return tuple(_turn(row, rewards) for row in rows)


def _turn(row: tuple[Any, ...], rewards: RewardsByPlace) -> Turn:
    index, parent, tokens, stop, role, kind, said = row
    new_ids, action_ids, logprobs = Tokens.unpack(tokens)
    action, observation, results, version_spans, (call_ends, rewarded_calls) = unpack_document(said)
    return Turn(
        index=index,
        parent=parent,
        new_ids=new_ids,
        action_ids=action_ids,
        logprobs=logprobs,
        version_spans=version_spans_from_json(version_spans),
        finish_reason=stop,
        action=to_action(action),
        observation=to_messages(observation),
        results=tuple(to_result(result) for result in results),
        rewards=rewards.get((index, None), {}),
        role=role,
        kind=kind,
        call_rewards=tuple(rewards.get((index, call), {}) for call in range(rewarded_calls)),
        call_ends=tuple(call_ends),
    )

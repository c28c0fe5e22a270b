"""Reading a run back, finished, interrupted, or still being written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from agent_r1.core.attempt import Attempt
from agent_r1.core.record import Dispatched, Fate, Happened, Measured
from agent_r1.core.trajectory import Status, Trajectory, Turn
from agent_r1.store.codec import to_action, to_messages, to_result, to_spans
from agent_r1.store.folder import DATABASE
from agent_r1.store.packed import Tokens, unpack_document
from agent_r1.store.rows import attempt_key, to_number, to_reward
from agent_r1.store.schema import open_reader

ATTEMPT = "attempts.run, attempts.task, attempts.group_serial, attempts.member, attempts.retry"
RewardsByTurn = dict[int | None, dict[str, Any]]


class RunReader:
    """What a run's ledger holds, as the core types that were recorded.

    Attempts, trajectories and fates come in the order of dispatch. Raises InvalidInput where ``folder``
    holds no run that this version can read.
    """

    def __init__(self, folder: Path) -> None:
        self._connection = open_reader(folder / DATABASE)

    def close(self) -> None:
        self._connection.close()

    def config(self) -> dict[str, Any]:
        """The resolved configuration the run was started with."""
        return json.loads(self._connection.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()[0])

    def dispatched(self) -> Iterator[Dispatched]:
        """Every attempt that was started."""
        for *attempt, split, version in self._rows(f"SELECT {ATTEMPT}, split, version FROM attempts ORDER BY rowid"):
            yield Dispatched(Attempt(*attempt), split, version)

    def trajectories(self, split: str | None = None) -> Iterator[Trajectory]:
        """Every attempt that ended; those of one split where it is named."""
        return self._trajectories("(?1 IS NULL OR split = ?1)", split)

    def trajectory(self, attempt: Attempt) -> Trajectory | None:
        """The trajectory of an attempt, None where it did not end."""
        return next(self._trajectories("attempts.attempt = ?1", attempt_key(attempt)), None)

    def fates(self) -> Iterator[Fate]:
        """What became of the attempts that met a fate."""
        columns = f"{ATTEMPT}, fate, step, reason"
        for *attempt, fate, step, reason in self._rows(
            f"SELECT {columns} FROM fates JOIN attempts USING (attempt) ORDER BY attempts.rowid"
        ):
            yield Fate(Attempt(*attempt), fate, step, reason)

    def metrics(self) -> Iterator[Measured]:
        """The metrics of each step, in the order of steps."""
        rows = self._rows("SELECT step, name, value FROM metrics ORDER BY step, rowid")
        for step, measured in groupby(rows, key=itemgetter(0)):
            yield Measured(step, {name: to_number(value) for _, name, value in measured})

    def events(self) -> Iterator[Happened]:
        """Whatever else happened, in order."""
        for kind, detail in self._rows("SELECT kind, detail FROM events ORDER BY id"):
            yield Happened(kind, detail)

    def _rows(self, sql: str, *parameters: Any) -> Iterator[tuple[Any, ...]]:
        return self._connection.execute(sql, parameters)

    def _trajectories(self, condition: str, parameter: str | None) -> Iterator[Trajectory]:
        columns = f"attempt, {ATTEMPT}, task_id, status, truncated, reason, seconds, start"
        sql = f"SELECT {columns} FROM attempts JOIN outcomes USING (attempt) WHERE {condition} ORDER BY attempts.rowid"
        for key, *attempt, task_id, status, truncated, reason, seconds, start in self._rows(sql, parameter):
            rewards = self._rewards(key)
            yield Trajectory(
                attempt=Attempt(*attempt),
                task_id=task_id,
                turns=self._turns(key, rewards),
                status=Status(status),
                truncated=bool(truncated),
                rewards=rewards.get(None, {}),
                reason=reason,
                start=to_messages(unpack_document(start)),
                seconds=seconds,
            )

    def _rewards(self, key: str) -> RewardsByTurn:
        rewards: RewardsByTurn = {}
        sql = "SELECT turn, name, value FROM rewards WHERE attempt = ? ORDER BY rowid"
        for turn, name, value in self._rows(sql, key):
            rewards.setdefault(turn, {})[name] = to_reward(value)
        return rewards

    def _turns(self, key: str, rewards: RewardsByTurn) -> tuple[Turn, ...]:
        columns = "turn, parent, tokens, stop, role, kind, said"
        rows = self._rows(f"SELECT {columns} FROM turns WHERE attempt = ? ORDER BY turn", key)
        return tuple(_turn(row, rewards.get(row[0], {})) for row in rows)


def _turn(row: tuple[Any, ...], rewards: Mapping[str, float]) -> Turn:
    index, parent, tokens, stop, role, kind, said = row
    new_ids, action_ids, logprobs = Tokens.unpack(tokens)
    action, observation, results, spans = unpack_document(said)
    return Turn(
        index=index,
        parent=parent,
        new_ids=new_ids,
        action_ids=action_ids,
        logprobs=logprobs,
        spans=to_spans(spans),
        stop=stop,
        action=to_action(action),
        observation=to_messages(observation),
        results=tuple(to_result(result) for result in results),
        rewards=rewards,
        role=role,
        kind=kind,
    )

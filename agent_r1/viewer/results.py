"""The result table and the list of events on the page of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.core.events import LogEvent
from agent_r1.store import RunReader
from agent_r1.store.reader import RecordedEvent
from agent_r1.store.results import ResultKind, read_results
from agent_r1.viewer.text import number

SHOWN_ELSEWHERE: frozenset[ResultKind] = frozenset({"table", "tools", "file", "hardware"})
"""The kinds of events that the list of events leaves out."""


@dataclass(frozen=True, slots=True)
class MethodRow:
    """A row of the result table.

    ``cells`` has one text for each split: the exact match and its 95 % interval, such as "0.95 (0.92 to 0.98)". A cell
    without a result is "".
    """

    method: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResultTable:
    splits: tuple[str, ...]
    rows: tuple[MethodRow, ...]


def read_table(reader: RunReader) -> ResultTable | None:
    """Return the newest result table of a run; None if there is no table, or if it cannot be read."""
    try:
        tables = [result["table"] for result in read_results(reader, "table")]
        if not tables:
            return None
        splits = tuple(dict.fromkeys(split for cells in tables[-1].values() for split in cells))
        rows = [
            MethodRow(method, tuple(_interval(cells[split]) if split in cells else "" for split in splits))
            for method, cells in tables[-1].items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return ResultTable(splits, tuple(rows))


def listed_events(reader: RunReader, most: int) -> Sequence[RecordedEvent]:
    """Return the last events of a run, newest first, with their details as text for people.

    Events that the page shows elsewhere are left out.
    """
    found = [event for event in reversed(reader.recent_events(most)) if event.event.kind not in SHOWN_ELSEWHERE]
    return [RecordedEvent(one.segment, one.time, _readable(one.event)) for one in found]


def _readable(event: LogEvent) -> LogEvent:
    if event.kind == "checkpoint_saved":
        return LogEvent(event.kind, f"step {event.detail}")
    if event.kind != "validation":
        return event
    try:
        data = json.loads(event.detail)
        text = f"step {data['step']}, {data['split']}: exact match {_interval(data)}, F1 {number(data['f1'])}"
    except (ValueError, KeyError, TypeError):
        return event
    return LogEvent(event.kind, f"{text}, {data['n']} questions")


def _interval(cell: dict[str, float]) -> str:
    return f"{number(cell['em'], 3)} ({cell['low']:z.2f} to {cell['high']:z.2f})"

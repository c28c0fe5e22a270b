"""The URL query of the table of attempts: conditions, order and page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args
from urllib.parse import urlencode

from agent_r1.core.events import LogEvent
from agent_r1.core.trajectory import Status
from agent_r1.store.attempt_list import AttemptFateName, AttemptFilter, AttemptOrder
from agent_r1.store.attempt_search import AttemptList
from agent_r1.store.reader import RecordedEvent, ResultKind, RunReader, read_results
from agent_r1.viewer.text import flatten, number

PAGE = 50

MAX_TEXT = 200
"""The largest number of characters of the text that a user searches for. A longer text is cut."""

FATES: Sequence[AttemptFateName] = ("trained", "dropped", "pending")

ORDERS: Sequence[AttemptOrder] = get_args(AttemptOrder)


@dataclass(frozen=True, slots=True)
class TableQuery:
    """A request for one page of the table of attempts.

    ``listed`` holds the conditions that select attempts, and the order of the attempts. The field ``after`` is the id
    of the last attempt on the previous page; "" for the first page.
    """

    listed: AttemptList = field(default_factory=AttemptList)
    after: str = ""

    @classmethod
    def read(cls, query: Mapping[str, str]) -> TableQuery:
        """Parse a URL query, such as ``status=completed&order=reward``. Ignore values that cannot be parsed."""
        where = AttemptFilter(
            status=next((one for one in Status if one.value == query.get("status")), None),
            fate=next((one for one in FATES if one == query.get("fate")), None),
            step=_integer(query.get("step", "")),
            task=query.get("task", "").strip() or None,
            reward_from=_number(query.get("from", "")),
            reward_to=_number(query.get("to", "")),
        )
        order: AttemptOrder = next((one for one in ORDERS if one == query.get("order")), "started")
        text = query.get("text", "").strip()[:MAX_TEXT] or None
        return cls(AttemptList(where, order, query.get("direction") != "up", text), query.get("after", ""))

    def write(self, after: str | None = None) -> str:
        """Return the URL query, such as ``?status=completed&after=..``; "" if all values are default values.

        Default values are left out. If the argument ``after`` is given, the query contains this argument and not the
        attribute ``after``.
        """
        where, listed = self.listed.where, self.listed
        values = {
            "status": where.status,
            "fate": where.fate,
            "step": where.step,
            "task": where.task,
            "from": where.reward_from,
            "to": where.reward_to,
            "text": listed.text,
            "order": None if listed.order == "started" else listed.order,
            "direction": None if listed.descending else "up",
            "after": (self.after if after is None else after) or None,
        }
        given = {name: str(value) for name, value in values.items() if value is not None}
        return f"?{urlencode(given)}" if given else ""

    def sorted_by(self, order: AttemptOrder) -> str:
        """Return the URL query of the first page sorted by ``order``, largest values first.

        If the table already has this order, the direction is reversed.
        """
        descending = not self.listed.descending if order == self.listed.order else True
        return TableQuery(replace(self.listed, order=order, descending=descending)).write()


def _integer(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


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
    """Return the last events of a run, newest first, with their details as text for people."""
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


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: Any
    default: Any = None


@dataclass(frozen=True, slots=True)
class DifferingSetting:
    """A setting that differs between runs. ``values`` has one entry per run; None for a run without the setting."""

    key: str
    values: tuple[Any, ...]


ALGORITHM = "algorithm."
DESCRIPTIVE = frozenset({"algorithm.paper", "algorithm.deviations", "run"})
"""Settings that only describe a run."""


def own_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return the settings of a run that differ from their defaults, except the settings of the algorithm.

    ``defaults`` has the defaults by dotted key. The default of a missing key is None.
    """
    found = []
    for key, value in flatten(config).items():
        default = defaults.get(key)  # None for an entry of a table, such as reward_weights.f1
        if not (key.startswith(ALGORITHM) or key in DESCRIPTIVE or _equal(value, default) or value == {}):
            found.append(Setting(key, value, default))
    return tuple(found)


def algorithm_settings(config: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return the settings of the run's algorithm, without its name and without empty values (0, "", None).

    The keys have no prefix ``algorithm.``.
    """
    # Default values are included, because they depend on the algorithm.
    flat = flatten(config)
    return tuple(
        Setting(key.removeprefix(ALGORITHM), value)
        for key, value in flat.items()
        if key.startswith(ALGORITHM) and key not in {*DESCRIPTIVE, f"{ALGORITHM}name"} and value
    )


def differing_settings(configs: Mapping[str, Mapping[str, Any]]) -> tuple[DifferingSetting, ...]:
    """Return the settings that do not have the same value in all runs. ``configs`` has the settings of each run."""
    flat = [flatten(config) for config in configs.values()]
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in DESCRIPTIVE)
    rows = [DifferingSetting(key, tuple(settings.get(key) for settings in flat)) for key in keys]
    return tuple(row for row in rows if any(not _equal(value, row.values[0]) for value in row.values))


def _equal(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)

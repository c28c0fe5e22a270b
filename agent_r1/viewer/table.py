"""The URL query of the table of attempts: conditions, order and page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args
from urllib.parse import urlencode

from agent_r1.core.trajectory import Status
from agent_r1.store import AttemptFilter
from agent_r1.store.attempt_list import AttemptFateName, AttemptOrder
from agent_r1.store.attempt_search import AttemptList

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

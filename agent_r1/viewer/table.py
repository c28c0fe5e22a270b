"""The query of a URL for the table of attempts: which attempts are listed, in which order, and which page is shown."""

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
"""The number of attempts on one page."""

MAX_TEXT = 200
"""The largest number of characters of a text to search for."""

FATES: Sequence[AttemptFateName] = ("trained", "dropped", "pending")

ORDERS: Sequence[AttemptOrder] = get_args(AttemptOrder)


@dataclass(frozen=True, slots=True)
class TableQuery:
    """The page of the table of attempts that a request asks for.

    Attributes:
        listed: the conditions and the order of the attempts.
        after: the id of the last attempt on the previous page; "" for the first page.
    """

    listed: AttemptList = field(default_factory=AttemptList)
    after: str = ""

    @classmethod
    def read(cls, query: Mapping[str, str]) -> TableQuery:
        """Parse the query of an address, such as ``status=completed&order=reward``.

        Values that cannot be parsed are ignored.
        """
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
        """Return the query for an address, such as ``?status=completed&after=..``. :meth:`read` parses this query.

        Values that equal their defaults are left out. If all values equal their defaults, return "".

        Args:
            after: replaces the attribute ``after``, to get another page; None for this page.
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
        """Return the query for the link in a heading: the first page of the table, sorted by ``order``.

        If the table is sorted by ``order`` already, the link reverses the order. Otherwise the largest values come
        first.
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

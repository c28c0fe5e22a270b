"""The list of attempts in a terminal, and the search for one attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from agent_r1.commands.show_run import safe
from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import STATUS_POLICY, AttemptId, Status
from agent_r1.store.attempt_list import AttemptFilter, AttemptSummary
from agent_r1.store.folder import run_argument
from agent_r1.store.reader import RunReader
from agent_r1.viewer.text import number, one_line

MAX_CANDIDATES = 5

WORDS: Mapping[str, str] = {
    "best": "the newest of the attempts with the highest reward",
    "worst": "the newest of the attempts with the lowest reward",
    "failed": "the newest attempt that failed, or whose reward could not be computed",
    "longest": "the attempt with the most tokens",
    "last": "the newest attempt that has ended",
}
"""The words that name an attempt, each with its meaning."""


def short_id(attempt: AttemptId) -> str:
    """Return the id of an attempt without the name of the run, in one line: ``GROUP.INDEX.RETRY:TASK``.

    Example:
        >>> short_id(AttemptId("demo", "style-a/7", 3, 0))
        '3.0.0:style-a/7'
    """
    return one_line(str(attempt).removeprefix(f"{attempt.run}:"))


def find_attempt(folder: Path, reader: RunReader, name: str, where: AttemptFilter) -> AttemptSummary:
    """Return the attempt that the argument ``name`` names.

    Only the attempts that meet the conditions in the argument ``where`` are searched.

    ``name`` is one of:

    - the id of the attempt, such as ``3.0.0:style-a/7``
    - the beginning of the id, such as ``3.0``, if this text fits only one attempt
    - a word of ``WORDS``, such as ``best`` or ``failed``

    Raise InvalidInput if no attempt or more than one attempt fits.
    """
    if name in WORDS:
        found = _by_word(reader, name, where)
        if found is None:
            do = f"list the attempts with 'agent-r1 show {run_argument(folder)} --attempts'"
            raise InvalidInput("attempt", got=f"{name}, but {folder} has no such attempt", do=do)
        return found
    # "3.1" means group 3, attempt 1, and not attempt 10 of group 3
    for prefix in (name, f"{name}:", f"{name}."):
        candidates = reader.list_attempts(replace(where, id_prefix=prefix), limit=MAX_CANDIDATES + 1)
        exact = [one for one in candidates if name in (str(one.attempt), short_id(one.attempt))]
        if len(exact or candidates) == 1:
            return (exact or candidates)[0]
    first = reader.list_attempts(replace(where, id_prefix=name), limit=MAX_CANDIDATES + 1)
    if not first:
        do = f"give an id of 'agent-r1 show {run_argument(folder)} --attempts', its beginning, or {', '.join(WORDS)}"
        raise InvalidInput("attempt", got=f"{name!r}, which is no attempt of {folder}", do=do)
    ids = ", ".join(short_id(one.attempt) for one in first[:MAX_CANDIDATES])
    more = " .." if len(first) > MAX_CANDIDATES else ""
    raise InvalidInput("attempt", got=f"{name!r}, which several ids begin with: {ids}{more}", do="give more of the id")


def _by_word(reader: RunReader, word: str, where: AttemptFilter) -> AttemptSummary | None:
    if word == "failed":
        scored = {status: False if policy == "train" else None for status, policy in STATUS_POLICY.items()}
        newest = [_newest(reader, replace(where, status=status, has_reward=flag)) for status, flag in scored.items()]
        return max((one for one in newest if one is not None), key=lambda one: one.attempt.sort_key, default=None)
    if word == "last":
        ended = [_newest(reader, replace(where, status=status)) for status in Status]
        return max((one for one in ended if one is not None), key=lambda one: one.attempt.sort_key, default=None)
    if word == "longest":
        return next(iter(reader.list_attempts(where, sort="tokens", descending=True, limit=1)), None)
    extreme = next(iter(reader.list_attempts(where, sort="reward", descending=word == "best", limit=1)), None)
    if extreme is None or extreme.reward is None:
        return None
    low, high = (extreme.reward, where.reward_to) if word == "best" else (where.reward_from, extreme.reward)
    return _newest(reader, replace(where, reward_from=low, reward_to=high))


def _newest(reader: RunReader, where: AttemptFilter) -> AttemptSummary | None:
    return next(iter(reader.list_attempts(where, descending=True, limit=1)), None)


def summary_json(summary: AttemptSummary) -> dict[str, Any]:
    """Return the summary of an attempt as a JSON object.

    Example:
        {"attempt": "demo:3.0.0:style-a/7", "task": "style-a/7", .., "status": "completed", "reward": 1.0, ..}
    """
    return {**asdict(summary), "attempt": str(summary.attempt), "task": summary.attempt.task}


def status_text(summary: AttemptSummary) -> Text:
    """Return the status of an attempt as colored text; "in progress" if the attempt has not ended."""
    if summary.status is None:
        return Text("in progress", "cyan")
    style = (
        "" if summary.status is Status.COMPLETED else "yellow" if STATUS_POLICY[summary.status] == "train" else "red"
    )
    return Text(summary.status.value.replace("_", " "), style)


_RIGHT = frozenset({"step", "reward", "credit", "turns", "tokens", "calls", "errors"})


@dataclass(frozen=True, slots=True)
class AttemptTable:
    """A table of attempts for the package ``rich``. A narrow terminal shows fewer columns.

    ``total`` is the number of attempts before ``--limit`` shortened the list.
    """

    attempts: Sequence[AttemptSummary]
    total: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = ["attempt", "step", "reward", "credit", "turns", "tokens", "errors", "status"]
        names += ["fate", "reason"] if options.max_width >= 110 else []
        grid = Table.grid(padding=(0, 2, 0, 0))
        for name in names:
            grid.add_column(justify="right" if name in _RIGHT else "left", no_wrap=True, overflow="ellipsis")
        grid.columns[0].min_width = 12
        grid.add_row(*(Text(name, "dim") for name in names))
        for one in self.attempts:
            cells = _cells(one)
            grid.add_row(*(status_text(one) if name == "status" else safe(cells[name]) for name in names))
        yield grid
        shown = "no attempts" if not self.attempts else f"{len(self.attempts):,} of {self.total:,} attempts"
        yield Text(shown, "dim")


def _cells(one: AttemptSummary) -> dict[str, str]:
    reason = one.status_reason or one.fate_reason or ""
    return {
        "attempt": short_id(one.attempt),
        "step": "" if one.step is None else str(one.step),
        "reward": number(one.reward, 3),
        "credit": number(one.credit, 3),
        "turns": str(one.turns),
        "tokens": str(one.action_tokens),
        "errors": str(one.call_errors or ""),
        "fate": one.fate or "pending",
        "reason": one_line(reason, 80),
    }

"""Calls of a batched tool that wait at the same time, across episodes, are executed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from agent_r1.tools.execution import CallFailure, CallOutcome, ReturnValue, run_with_timeout

BatchFunction = Callable[[list[dict[str, Any]]], Any]
"""Takes the arguments of many calls, gives (or, async, promises) the list of their outputs in the same order."""

MAX_BATCH = 64
"""Calls in one execution, at most."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that waits: where it stands among others, what it asks, and where its outcome goes."""

    order: tuple[int, ...]
    arguments: dict[str, Any]
    timeout: float
    outcome: asyncio.Future[CallOutcome]


@dataclass(slots=True)
class _Line:
    """The calls that wait in one event loop, and the task that serves them."""

    waiting: list[_Waiting] = field(default_factory=list)
    server: asyncio.Task[None] | None = None


class CallBatcher:
    """Collects calls and executes them in batches, one batch at a time.

    No call is delayed to make a batch larger: a batch holds what was asked in the same round of the
    event loop, or while the last batch was at work. Inside a batch calls are ordered by ``order``.
    """

    def __init__(self, batch: BatchFunction) -> None:
        self._batch = batch
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()

    async def run(self, arguments: dict[str, Any], order: tuple[int, ...], timeout: float) -> CallOutcome:
        """Join the line and wait for the outcome. ``timeout`` counts from when the call's batch starts."""
        loop = asyncio.get_running_loop()
        line = self._lines.setdefault(loop, _Line())
        waiting = _Waiting(order, arguments, timeout, loop.create_future())
        line.waiting.append(waiting)
        if line.server is None:
            line.server = loop.create_task(self._serve(line))
        return await waiting.outcome

    async def _serve(self, line: _Line) -> None:
        """Consumes the waiting calls; ends when there are none; started by the first call to join."""
        batch: list[_Waiting] = []
        try:
            while line.waiting:
                waiting = [call for call in line.waiting if not call.outcome.done()]
                waiting.sort(key=lambda call: call.order)
                batch, line.waiting = waiting[:MAX_BATCH], waiting[MAX_BATCH:]
                if batch:
                    await self._execute(batch)
        finally:
            line.server = None
            left = (*batch, *line.waiting)  # all settled, unless this task was cancelled: nobody may wait for ever
            _settle(left, [CallFailure("its batch was given up")] * len(left))

    async def _execute(self, batch: Sequence[_Waiting]) -> None:
        timeout = max(call.timeout for call in batch)
        outcomes = await self._outcomes([call.arguments for call in batch], timeout)
        _settle(batch, outcomes)

    async def _outcomes(self, calls: list[dict[str, Any]], timeout: float) -> list[CallOutcome]:
        """One outcome per call. Where a batch raises, its calls run one by one: only the faulty one fails."""
        outcome = await run_with_timeout(partial(self._batch, calls), timeout)
        if isinstance(outcome, ReturnValue):
            outcomes = _split(outcome.value, len(calls))
            if outcomes is not None:
                return outcomes
            outcome = CallFailure(f"the batched form did not return a list with one output for each of {len(calls)} calls")
        if isinstance(outcome, CallFailure) and len(calls) > 1:
            return [(await self._outcomes([call], timeout))[0] for call in calls]
        return [outcome] * len(calls)


def _settle(calls: Sequence[_Waiting], outcomes: Sequence[CallOutcome]) -> None:
    """Hand out the outcomes; who has one, or waits no more, is left alone."""
    for call, outcome in zip(calls, outcomes, strict=True):
        if not call.outcome.done():
            call.outcome.set_result(outcome)


def _split(outputs: object, count: int) -> list[CallOutcome] | None:
    """One outcome per output; None where there is not one output for each call."""
    if isinstance(outputs, list | tuple) and len(outputs) == count:
        return [ReturnValue(output) for output in outputs]
    return None

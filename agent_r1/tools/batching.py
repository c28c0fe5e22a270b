"""Execute the calls of a tool in batches. A batch can contain calls from different episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from agent_r1.core.tasks import shared_task
from agent_r1.tools.execution import CallFailure, CallOutcome, ReturnValue, run_with_timeout

BatchFunction = Callable[[list[dict[str, Any]]], Any]
"""A sync or async function that executes several calls.

It takes a list with the keyword arguments of each call, and returns a list with the outputs in the same order.
"""

MAX_BATCH = 64


@dataclass(frozen=True, slots=True)
class _PendingCall:
    order: tuple[int, ...]
    arguments: dict[str, Any]
    timeout: float
    outcome: asyncio.Future[CallOutcome]


@dataclass(slots=True)
class _Queue:
    pending: list[_PendingCall] = field(default_factory=list)
    consumer: asyncio.Task[None] | None = None


class CallBatcher:
    """A batcher, which collects the calls of one tool and executes them in batches, one batch at a time.

    Calls that arrive while a batch is running wait for a later batch. A batch has at most ``MAX_BATCH`` calls.
    """

    def __init__(self, batch: BatchFunction) -> None:
        self._batch = batch
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()

    async def run(self, arguments: dict[str, Any], order: tuple[int, ...], timeout: float) -> CallOutcome:
        """Add a call to the waiting calls. Return the outcome of the call when its batch has run.

        ``order`` is the sort key of the call. The first ``MAX_BATCH`` waiting calls, sorted by key, are the next batch.
        The time limit of a batch is the largest ``timeout`` of its calls, in seconds.
        """
        loop = asyncio.get_running_loop()
        queue = self._queues.setdefault(loop, _Queue())
        call = _PendingCall(order, arguments, timeout, loop.create_future())
        queue.pending.append(call)
        if queue.consumer is None:
            queue.consumer = shared_task(self._consume(queue))
        return await call.outcome

    async def _consume(self, queue: _Queue) -> None:
        batch: list[_PendingCall] = []
        try:
            while queue.pending:
                # A call whose episode was cancelled has a cancelled future.
                pending = [call for call in queue.pending if not call.outcome.done()]
                pending.sort(key=lambda call: call.order)
                batch, queue.pending = pending[:MAX_BATCH], pending[MAX_BATCH:]
                if batch:
                    timeout = max(call.timeout for call in batch)
                    _resolve(batch, await self._execute([call.arguments for call in batch], timeout))
        finally:
            queue.consumer = None
            # Calls without an outcome remain only if this task was cancelled. Their callers must not wait forever.
            rest = (*batch, *queue.pending)
            _resolve(rest, [CallFailure("its batch was given up")] * len(rest))

    async def _execute(self, calls: list[dict[str, Any]], timeout: float) -> list[CallOutcome]:
        """Execute one batch and return the outcomes of its calls, in their order.

        If the batch function raises an exception or returns a wrong number of outputs, execute the calls one by one. If
        the batch exceeds its time limit, all its calls fail.
        """
        outcome = await run_with_timeout(partial(self._batch, calls), timeout)
        if isinstance(outcome, ReturnValue):
            outputs = outcome.value
            if isinstance(outputs, list | tuple) and len(outputs) == len(calls):
                return [ReturnValue(output) for output in outputs]
            outcome = CallFailure(
                f"the batched form did not return a list with one output for each of {len(calls)} calls"
            )
        if isinstance(outcome, CallFailure) and len(calls) > 1:
            return [(await self._execute([call], timeout))[0] for call in calls]
        return [outcome] * len(calls)


def _resolve(calls: Sequence[_PendingCall], outcomes: Sequence[CallOutcome]) -> None:
    for call, outcome in zip(calls, outcomes, strict=True):
        if not call.outcome.done():
            call.outcome.set_result(outcome)

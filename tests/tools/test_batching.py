"""Batched tools: waiting calls run together, in a fixed order, and fail separately."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.tools.execution import MAX_BATCH
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind

Batch = Callable[[list[dict[str, Any]]], Any]


def batched(batch: Batch, timeout: float | None = None) -> Tool:
    @tool(batch=batch, timeout=timeout)
    def search(query: str, k: int = 3) -> str:
        """Search."""
        raise AssertionError("the batched form does the work")

    return search


def ask(made: Tool, queries: list[str], task: Task, context: Any) -> list[ToolResult]:
    async def together() -> list[ToolResult]:
        return await asyncio.gather(*(made.run({"query": q}, task, context(i)) for i, q in enumerate(queries)))

    return asyncio.run(together())


def texts_of(results: list[ToolResult]) -> list[str]:
    return [part.text for result in results for part in result.parts if isinstance(part, Text)]


class Recording:
    """A batch function that records its calls."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, calls: list[dict[str, Any]]) -> list[str]:
        self.batches.append([call["query"] for call in calls])
        time.sleep(0.01)
        return [f"{call['query']} {call['k']}" for call in calls]


def test_waiting_calls_run_in_one_batch_and_get_their_own_outputs(task: Task, context: Any) -> None:
    batch = Recording()
    results = ask(batched(batch), [f"q{i}" for i in range(40)], task, context)
    assert texts_of(results) == [f"q{i} 3" for i in range(40)]
    assert batch.batches == [[f"q{i}" for i in range(40)]]


def test_a_batch_is_bounded(task: Task, context: Any) -> None:
    batch = Recording()
    queries = [f"q{i}" for i in range(2 * MAX_BATCH + 5)]
    assert texts_of(ask(batched(batch), queries, task, context)) == [f"{query} 3" for query in queries]
    assert [len(queries) for queries in batch.batches] == [MAX_BATCH, MAX_BATCH, 5]


def test_calls_that_arrive_during_a_batch_form_the_next_one(task: Task, context: Any) -> None:
    batch = Recording()
    search = batched(batch)

    async def staggered() -> None:
        first = asyncio.create_task(search.run({"query": "first"}, task, context(0)))
        await asyncio.sleep(0.005)
        rest = [search.run({"query": f"q{i}"}, task, context(i)) for i in range(3)]
        await asyncio.gather(first, *rest)

    asyncio.run(staggered())
    assert batch.batches == [["first"], ["q0", "q1", "q2"]]


def test_calls_in_a_batch_are_sorted_by_attempt(task: Task, context: Any) -> None:
    batch = Recording()
    search = batched(batch)

    async def backwards() -> None:
        await asyncio.gather(*(search.run({"query": f"q{i}"}, task, context(i)) for i in reversed(range(5))))

    asyncio.run(backwards())
    assert batch.batches == [["q0", "q1", "q2", "q3", "q4"]]


def test_an_async_batch_function_works_in_several_event_loops(task: Task, context: Any) -> None:
    async def batch(calls: list[dict[str, Any]]) -> list[str]:
        await asyncio.sleep(0.001)
        return [call["query"].upper() for call in calls]

    search = batched(batch)
    for _ in range(3):
        assert texts_of(ask(search, ["a", "b"], task, context)) == ["A", "B"]


def test_task_and_context_are_among_the_arguments(task: Task, context: Any) -> None:
    def batch(calls: list[dict[str, Any]]) -> list[str]:
        return [f"{call['of'].id} {call['where'].id.sample_index}" for call in calls]

    @tool(batch=batch)
    def search(query: str, of: Task, where: RolloutContext) -> str:
        """Search."""
        return ""

    assert texts_of(ask(search, ["a", "b"], task, context)) == ["t/1 0", "t/1 1"]


def test_one_call_that_raises_fails_alone(task: Task, context: Any) -> None:
    def batch(calls: list[dict[str, Any]]) -> list[str]:
        return [str(100 // int(call["query"])) for call in calls]

    results = ask(batched(batch), ["1", "0", "5", "x"], task, context)
    assert [result.ok for result in results] == [True, False, True, False]
    assert texts_of(results)[0] == "100"
    assert "ZeroDivisionError" in texts_of(results)[1]
    assert "ValueError" in texts_of(results)[3]


@pytest.mark.parametrize("outputs", [["one"], "ab", None])
def test_a_batch_function_must_return_one_output_per_call(outputs: Any, task: Task, context: Any) -> None:
    results = ask(batched(lambda calls: outputs if len(calls) > 1 else 7), ["a", "b"], task, context)
    assert [result.error for result in results] == [ToolErrorKind.RAISED] * 2
    assert "one output for each of 1 calls" in texts_of(results)[0]


def test_a_bad_output_fails_its_call_only(task: Task, context: Any) -> None:
    results = ask(batched(lambda calls: ["fine", object()]), ["a", "b"], task, context)
    assert [result.error for result in results] == [None, ToolErrorKind.BAD_RESULT]


def test_a_batch_that_hangs_times_out_and_the_next_one_runs(task: Task, context: Any) -> None:
    def batch(calls: list[dict[str, Any]]) -> list[str]:
        time.sleep(1.0 if calls[0]["query"] == "hang" else 0.0)
        return ["done"] * len(calls)

    search = batched(batch, timeout=0.1)

    async def one_after_the_other() -> list[ToolResult]:
        hung = asyncio.create_task(search.run({"query": "hang"}, task, context(0)))
        await asyncio.sleep(0.02)
        return [*await asyncio.gather(hung, search.run({"query": "next"}, task, context(1)))]

    assert [result.error for result in asyncio.run(one_after_the_other())] == [ToolErrorKind.TIMED_OUT, None]


def test_a_cancelled_call_does_not_affect_the_others_of_its_batch(task: Task, context: Any) -> None:
    batch = Recording()
    search = batched(batch)

    async def cancel_one() -> ToolResult:
        kept, dropped = (asyncio.create_task(search.run({"query": q}, task, context(i))) for i, q in enumerate("ab"))
        await asyncio.sleep(0.005)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        return await kept

    assert asyncio.run(cancel_one()).ok
    assert batch.batches == [["a", "b"]]


def test_pending_calls_fail_if_the_consumer_task_is_cancelled(task: Task, context: Any) -> None:
    search = batched(Recording())

    async def kill() -> ToolResult:
        call = asyncio.create_task(search.run({"query": "a"}, task, context()))
        await asyncio.sleep(0.002)
        assert search.batcher is not None
        (queue,) = search.batcher._queues.values()
        assert queue.consumer is not None
        queue.consumer.cancel()
        return await call

    assert texts_of([asyncio.run(kill())]) == ["search failed: its batch was given up"]


def test_the_event_loop_can_end_during_a_batch(task: Task, context: Any) -> None:
    search = batched(Recording())

    async def leave() -> None:
        asyncio.create_task(search.run({"query": "a"}, task, context()))  # noqa: RUF006
        await asyncio.sleep(0.002)

    asyncio.run(leave())
    assert texts_of(ask(search, ["b"], task, context)) == ["b 3"]  # and the tool is as good as new

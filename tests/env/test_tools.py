"""``@tool``: schemas, checked arguments, and failures that are told and not raised."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Text
from agent_r1.core.task import Task, ToolResult
from agent_r1.core.world import Context
from agent_r1.env import Fault, Tool, tool


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


class Place(BaseModel):
    title: str
    height: int = 0


@tool
def everything(
    query: str,
    title: str,
    k: int = 3,
    unit: Unit = Unit.METRE,
    place: Place | None = None,
    *,
    order: Literal["up", "down"] = "up",
    tags: tuple[str, ...] = (),
    schema: Annotated[int, Field(ge=1, description="from the annotation")] = 1,
) -> str:
    """Do everything.

    Args:
        query: what to look for.
        k: how many.
    """
    return json.dumps([query, title, k, unit.value, place and place.title, order, tags, schema])


def run(made: Tool, arguments: dict[str, Any], task: Task, context: Context, timeout: float = 60.0) -> ToolResult:
    return asyncio.run(made.run(arguments, task, context, timeout))


def text_of(result: ToolResult) -> str:
    return "".join(part.text for part in result.parts if isinstance(part, Text))


def failure(
    made: Tool, arguments: dict[str, Any], task: Task, context: Context, timeout: float = 60.0
) -> tuple[str, str]:
    result = run(made, arguments, task, context, timeout)
    assert not result.ok
    return str(result.error), text_of(result)


# ---- the schema


def test_schema_follows_the_signature() -> None:
    spec = everything.spec
    assert (spec.name, spec.description) == ("everything", "Do everything.")
    schema = spec.parameters
    assert list(schema) == ["type", "properties", "required", "$defs"]
    assert schema["type"] == "object"
    assert list(schema["properties"]) == ["query", "title", "k", "unit", "place", "order", "tags", "schema"]
    assert schema["required"] == ["query", "title"]
    assert schema["properties"]["query"] == {"description": "what to look for.", "type": "string"}
    assert schema["properties"]["k"] == {"default": 3, "description": "how many.", "type": "integer"}
    assert schema["properties"]["order"] == {"default": "up", "enum": ["up", "down"], "type": "string"}
    assert schema["properties"]["schema"]["description"] == "from the annotation"


def test_schema_has_no_invented_titles_but_keeps_a_property_of_that_name() -> None:
    place = everything.spec.parameters["$defs"]["Place"]
    assert list(place) == ["properties", "required", "type"]
    assert place["properties"]["title"] == {"type": "string"}


def test_schema_of_a_tool_without_arguments_is_an_empty_object() -> None:
    @tool
    def now() -> str:
        """Tell the time."""
        return "noon"

    assert now.spec.parameters == {"type": "object", "properties": {}}


def test_task_and_context_are_filled_in_and_not_in_the_schema(task: Task, context: Any) -> None:
    @tool
    def peek(task: Task, key: str, where: Context) -> str:
        """Peek.

        Args:
            task: filled in.
            key: what to read.
        """
        return f"{task.id} {key} {where.attempt.member}"

    assert list(peek.spec.parameters["properties"]) == ["key"]
    assert text_of(run(peek, {"key": "x"}, task, context(7))) == "t/1 x 7"
    assert failure(peek, {"key": "x", "task": "forged"}, task, context())[0] == Fault.INVALID_ARGUMENTS


def test_name_and_timeout_can_be_given() -> None:
    @tool(name="look-up", timeout=2.0)
    def search(query: str) -> str:
        """Search."""
        return query

    assert (search.spec.name, search.timeout) == ("look-up", 2.0)


def no_docstring(query: str) -> str:
    return query


def no_type(query) -> str:  # type: ignore[no-untyped-def]
    """Search."""
    return str(query)


def many(*queries: str) -> str:
    """Search."""
    return " ".join(queries)


def explains_another(query: str) -> str:
    """Search.

    Args:
        qurey: a slip of the pen.
    """
    return query


def no_schema(query: threading.Lock) -> str:  # type: ignore[valid-type]
    """Search."""
    return str(query)


def unknown_type(query: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Search."""
    return str(query)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_docstring, "no docstring"),
        (no_type, "'query'"),
        (many, "*queries"),
        (explains_another, "qurey"),
        (no_schema, "schema"),
        (unknown_type, "Nowhere"),
        ("text", "give a function"),
    ],
)
def test_a_function_that_is_no_tool_is_refused_with_the_reason(function: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match="tool") as caught:
        tool(function)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"name": "two words"}, {"name": ""}, {"timeout": 0}, {"timeout": float("nan")}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    def search(query: str) -> str:
        """Search."""
        return query

    with pytest.raises(InvalidInput):
        tool(**options)(search)


# ---- arguments


def test_arguments_are_converted_where_that_is_safe(task: Task, context: Any) -> None:
    arguments = {"query": 1984, "title": "t", "k": "5", "unit": "ft", "place": {"title": "here"}, "tags": ["a"]}
    result = run(everything, arguments, task, context())
    assert json.loads(text_of(result)) == ["1984", "t", 5, "ft", "here", "up", ["a"], 1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"title": "t"}, "query: Field required"),
        ({"query": "q", "title": "t", "kk": 1}, "kk: there is no such argument"),
        ({"query": "q", "title": "t", "k": "many"}, "k: Input should be a valid integer"),
        ({"query": None, "title": "t"}, "query: Input should be a valid string"),
        ({"query": "q", "title": "t", "order": "left"}, "order: Input should be 'up' or 'down'"),
        ({"query": "q", "title": "t", "place": {"height": 1}}, "place.title: Field required"),
        ({"p0": "q", "title": "t"}, "p0: there is no such argument"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], told: str, task: Task, context: Any) -> None:
    kind, text = failure(everything, arguments, task, context())
    assert kind == Fault.INVALID_ARGUMENTS
    assert told in text
    assert "Expected: query (string), title (string), k (integer, optional), " in text
    assert "order (one of 'up', 'down', optional)" in text


def test_a_default_is_fresh_for_every_call(task: Task, context: Any) -> None:
    @tool
    def collect(item: str, into: list[str] = []) -> list[str]:  # noqa: B006
        """Collect."""
        into.append(item)
        return into

    assert [text_of(run(collect, {"item": item}, task, context())) for item in "ab"] == ['["a"]', '["b"]']


# ---- results


@pytest.mark.parametrize(
    ("value", "text"),
    [("plain", "plain"), (3, "3"), (None, "null"), ({"é": [1, 2.5]}, '{"é": [1, 2.5]}'), ([True], "[true]")],
)
def test_text_is_shown_as_it_is_and_values_as_json(value: Any, text: str, task: Task, context: Any) -> None:
    @tool
    def give() -> Any:
        """Give."""
        return value

    result = run(give, {}, task, context())
    assert (result.ok, result.error, text_of(result)) == (True, None, text)
    assert result.seconds > 0


def test_a_result_of_its_own_keeps_its_data(task: Task, context: Any) -> None:
    @tool
    def give() -> ToolResult:
        """Give."""
        return ToolResult((Text("shown"),), ok=True, data={"gold": 1})

    assert run(give, {}, task, context()).data == {"gold": 1}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", float("nan"), ToolResult("text", True), {(1, 2): 3}])  # type: ignore[arg-type]
def test_a_result_that_cannot_be_shown_is_a_failure(value: Any, task: Task, context: Any) -> None:
    @tool
    async def give() -> Any:
        """Give."""
        return value

    kind, text = failure(give, {}, task, context())
    assert kind == Fault.BAD_RESULT
    assert text.startswith("give failed")


# ---- failures of the tool


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error", [ValueError("no such page"), Unprintable(), SystemExit(3), StopIteration(1), RecursionError()]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_tool_raises_is_told(error: BaseException, is_async: bool, task: Task, context: Any) -> None:
    def sync_form() -> str:
        """Fail."""
        raise error

    async def async_form() -> str:
        """Fail."""
        raise error

    kind, text = failure(tool(name="fail")(async_form if is_async else sync_form), {}, task, context())
    assert kind == Fault.RAISED
    assert text.startswith("fail failed: ")
    assert is_async or type(error).__name__ in text


def test_a_tools_own_timeout_error_is_not_ours(task: Task, context: Any) -> None:
    @tool
    async def fetch() -> str:
        """Fetch."""
        raise TimeoutError("the server is slow")

    assert failure(fetch, {}, task, context()) == (Fault.RAISED, "fetch failed: TimeoutError: the server is slow")


def test_a_tool_that_cancels_its_own_work_has_failed(task: Task, context: Any) -> None:
    @tool
    async def fetch() -> str:
        """Fetch."""
        raise asyncio.CancelledError

    assert failure(fetch, {}, task, context())[0] == Fault.RAISED


@tool
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


@tool
async def async_sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "slept"


@pytest.mark.parametrize("slow", [sleep, async_sleep])
def test_a_slow_tool_is_stopped_in_time(slow: Tool, task: Task, context: Any) -> None:
    started = time.monotonic()
    kind, text = failure(slow, {"seconds": 1.5}, task, context(), timeout=0.05)
    assert time.monotonic() - started < 1.0
    assert kind == Fault.TIMED_OUT
    assert "0.05 seconds" in text
    assert run(slow, {"seconds": 0.01}, task, context(), timeout=5.0).ok  # the control: with more time it succeeds


def test_the_tools_own_timeout_comes_first(task: Task, context: Any) -> None:
    @tool(timeout=0.05)
    async def slow() -> str:
        """Be slow."""
        await asyncio.sleep(1.0)
        return "done"

    assert failure(slow, {}, task, context(), timeout=30.0)[0] == Fault.TIMED_OUT


def test_slow_sync_tools_block_nobody(task: Task, context: Any) -> None:
    async def all_at_once() -> tuple[float, int]:
        """Seconds that 20 sleeping tools take, and how often the event loop got a turn meanwhile."""
        sleeping = asyncio.gather(*(sleep.run({"seconds": 0.2}, task, context(i)) for i in range(20)))
        started, rounds = time.monotonic(), 0
        while not sleeping.done():
            await asyncio.sleep(0.01)
            rounds += 1
        return time.monotonic() - started, rounds

    seconds, rounds = asyncio.run(all_at_once())
    assert seconds < 2.0  # one after the other they take 4
    assert rounds > 5


def test_cancelling_the_episode_passes_through(task: Task, context: Any) -> None:
    async def cancel(made: Tool) -> None:
        running = asyncio.create_task(made.run({"seconds": 0.5}, task, context()))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    for made in (sleep, async_sleep):
        asyncio.run(cancel(made))


def test_outputs_keep_to_their_calls_whatever_the_threads_do(task: Task, context: Any) -> None:
    async def all_at_once() -> list[str]:
        waits = [0.02 * (i % 3) for i in range(60)]
        results = await asyncio.gather(
            *(echo.run({"i": i, "wait": wait}, task, context(i)) for i, wait in enumerate(waits))
        )
        return [text_of(result) for result in results]

    @tool
    def echo(i: int, wait: float) -> int:
        """Echo."""
        time.sleep(wait)
        return i

    assert asyncio.run(all_at_once()) == [str(i) for i in range(60)]


def test_a_hung_tool_keeps_no_process_alive() -> None:
    program = """
import asyncio, time
from agent_r1.core.attempt import Attempt
from agent_r1.core.task import Task
from agent_r1.core.world import Context
from agent_r1.env import tool

@tool
def hang() -> str:
    "Hang."
    time.sleep(600)

result = asyncio.run(hang.run({}, Task("t", ()), Context(Attempt("r", "t", 0, 0), 0), 0.1))
print(result.error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout.strip()) == (0, "timed out")


def test_hung_threads_make_room_for_others(task: Task, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.env.running.MAX_THREADS", 2)

    async def hang_then_work() -> list[str]:
        calls = [sleep.run({"seconds": 2.0 if i < 4 else 0.0}, task, context(i), 0.1) for i in range(6)]
        return [text_of(result) for result in await asyncio.gather(*calls)]

    texts = asyncio.run(hang_then_work())
    assert [text == "slept" for text in texts] == [False] * 4 + [True] * 2

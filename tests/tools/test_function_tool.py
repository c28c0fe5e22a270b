"""``@tool``: schemas, validation of arguments, and results."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from running_tools import failure, run, text_of

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.sandbox.config import SandboxConfig
from agent_r1.tools.function_tool import tool
from agent_r1.tools.tool_errors import ToolErrorKind


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


def test_the_schema_has_no_generated_titles_but_keeps_a_property_called_title() -> None:
    place = everything.spec.parameters["$defs"]["Place"]
    assert list(place) == ["properties", "required", "type"]
    assert place["properties"]["title"] == {"type": "string"}


def test_task_and_context_are_filled_in_and_not_in_the_schema(task: Task, context: Any) -> None:
    @tool
    def peek(task: Task, key: str, where: RolloutContext) -> str:
        """Peek.

        Args:
            task: filled in.
            key: what to read.
        """
        return f"{task.id} {key} {where.id.sample_index}"

    assert list(peek.spec.parameters["properties"]) == ["key"]
    assert text_of(run(peek, {"key": "x"}, task, context(7))) == "t/1 x 7"
    assert failure(peek, {"key": "x", "task": "forged"}, task, context())[0] == ToolErrorKind.INVALID_ARGUMENTS


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
    ("function", "message"),
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
def test_a_function_that_cannot_be_a_tool_is_refused_with_the_reason(function: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match="tool") as caught:
        tool(function)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"name": "two words"}, {"name": ""}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    def search(query: str) -> str:
        """Search."""
        return query

    with pytest.raises(InvalidInput):
        tool(**options)(search)


# ---- arguments


def test_arguments_are_converted_if_that_is_safe(task: Task, context: Any) -> None:
    arguments = {"query": 1984, "title": "t", "k": "5", "unit": "ft", "place": {"title": "here"}, "tags": ["a"]}
    result = run(everything, arguments, task, context())
    assert json.loads(text_of(result)) == ["1984", "t", 5, "ft", "here", "up", ["a"], 1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
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
def test_wrong_arguments_are_explained(arguments: dict[str, Any], expected: str, task: Task, context: Any) -> None:
    kind, text = failure(everything, arguments, task, context())
    assert kind == ToolErrorKind.INVALID_ARGUMENTS
    assert expected in text
    assert "Expected: query (string), title (string), k (integer, optional), " in text
    assert "order (one of 'up', 'down', optional)" in text


class Level(Enum):
    LOW = "1"
    HIGH = "true"


@dataclass
class Point:
    x: float


class Box(BaseModel):
    corner: Point
    sizes: dict[str, float] = {}


@tool
def measure(
    at: float = math.inf,
    many: list[float] | None = None,
    pair: tuple[float, float] = (0.0, 0.0),
    box: Box | None = None,
    level: Level = Level.LOW,
    levels: list[Level] = [],  # noqa: B006
    text: str = "",
) -> str:
    """Measure."""
    return f"{at} {level.value} {[one.value for one in levels]} {text}"


@pytest.mark.parametrize("number", ["nan", "1e999", "-inf", "Infinity", " NaN ", float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("around", "place"),
    [
        (lambda x: {"at": x}, "at"),
        (lambda x: {"many": [1, x]}, "many.1"),
        (lambda x: {"pair": [x, 1]}, "pair.0"),
        (lambda x: {"box": {"corner": {"x": x}}}, "box.corner.x"),
        (lambda x: {"box": {"corner": {"x": 1}, "sizes": {"a": x}}}, "box.sizes.a"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(
    number: Any, around: Any, place: str, task: Task, context: Any
) -> None:
    kind, text = failure(measure, around(number), task, context())
    assert kind == ToolErrorKind.INVALID_ARGUMENTS and f"{place}: give a finite number" in text


def test_texts_and_defaults_that_look_like_no_number_are_kept(task: Task, context: Any) -> None:
    result = run(measure, {"text": "nan", "level": "true", "levels": ["1"]}, task, context())
    assert text_of(result) == "inf true ['1'] nan"


@pytest.mark.parametrize("arguments", [{"level": "2"}, {"levels": ["2"]}, {"level": 1}, {"lvl": "1"}, {"level": None}])
def test_the_values_of_an_enum_are_named(arguments: dict[str, Any], task: Task, context: Any) -> None:
    text = failure(measure, arguments, task, context())[1]
    assert "level (one of '1', 'true', optional), levels (array of one of '1', 'true', optional)" in text


# ---- results


@pytest.mark.parametrize(
    ("value", "text"),
    [("plain", "plain"), (3, "3"), (None, "null"), ({"é": [1, 2.5]}, '{"é": [1, 2.5]}'), ([True], "[true]")],
)
def test_text_is_returned_unchanged_and_values_as_json(value: Any, text: str, task: Task, context: Any) -> None:
    @tool
    def give() -> Any:
        """Give."""
        return value

    result = run(give, {}, task, context())
    assert (result.ok, result.error, text_of(result)) == (True, None, text)
    assert result.seconds > 0


def test_a_tool_result_keeps_its_data(task: Task, context: Any) -> None:
    @tool
    def give() -> ToolResult:
        """Give."""
        return ToolResult((Text("shown"),), ok=True, data={"gold": 1})

    assert run(give, {}, task, context()).data == {"gold": 1}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", float("nan"), ToolResult("text", True), {(1, 2): 3}])  # type: ignore[arg-type]
def test_an_unusable_result_is_a_failure(value: Any, task: Task, context: Any) -> None:
    @tool
    async def give() -> Any:
        """Give."""
        return value

    kind, text = failure(give, {}, task, context())
    assert kind == ToolErrorKind.BAD_RESULT
    assert text.startswith("give failed")


@pytest.mark.parametrize("make", [lambda place: tool(sandbox=place), lambda place: ToolEnv(tools=[], sandbox=place)])
def test_a_sandbox_declaration_of_the_wrong_type_is_refused(make: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^sandbox: got SandboxConfig\(.*; give a Sandbox, or say in words"):
        make(SandboxConfig(level="none"))

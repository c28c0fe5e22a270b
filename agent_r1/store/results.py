"""Results of a run that are log events with JSON: its tools, its validations, and its final table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from agent_r1.core.events import LogEvent
from agent_r1.core.tool import ToolSpec
from agent_r1.store.reader import RunReader

ResultKind = Literal["tools", "validation", "table"]
"""The kind of a log event with a result.

- tools: the tools of the training environment in the OpenAI format, recorded at the start of each segment.
- validation: the figures of one validation: step, split, em, f1, n, and the interval from low to high.
- table: the table of methods at the end of a run, as ``agent-r1 train --json`` prints it.
"""


def result_event(kind: ResultKind, value: Mapping[str, Any] | Sequence[Any]) -> LogEvent:
    """Return the log event that records a result of a run. ``value`` is recorded as JSON.

    ``kind`` is "tools", "validation" or "table".
    """
    return LogEvent(kind, json.dumps(value))


def tools_event(tools: Sequence[ToolSpec]) -> LogEvent:
    """Return the event that records the tools of the training environment."""
    return result_event("tools", [tool.to_openai() for tool in tools])


def read_results(reader: RunReader, kind: ResultKind) -> Iterator[Any]:
    """Yield the results of the kind "tools", "validation" or "table", in the order in which they were recorded.

    Each result is the JSON value that was given to :func:`result_event`.
    """
    for event in reader.events():
        if event.kind == kind:
            yield json.loads(event.detail)


def read_tools(reader: RunReader) -> list[dict[str, Any]]:
    """Return the tools of the training environment, in the OpenAI format; [] if the run did not record its tools."""
    tools: list[list[dict[str, Any]]] = list(read_results(reader, "tools"))
    return tools[-1] if tools else []  # those of the last segment

"""Facts and results of a run that are recorded as log events with JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from agent_r1.core.events import LogEvent
from agent_r1.core.tool import ToolSpec
from agent_r1.store.reader import RunReader

ResultKind = Literal["tools", "file", "hardware", "validation", "table"]
"""The kind of a log event with a fact or a result. The first three are recorded at every start or resumption.

- tools: the tools of the training environment in the OpenAI format.
- file: the absolute path of the Python file that defines the task set.
- hardware: processor, cores, GPUs and the version of torch.
- validation: the figures of one validation: step, split, em, f1, n, and the confidence interval from low to high.
- table: the table of methods at the end of a run, as ``agent-r1 train --json`` prints it.
"""


def result_event(kind: ResultKind, value: Mapping[str, Any] | Sequence[Any] | str) -> LogEvent:
    return LogEvent(kind, json.dumps(value))


def tools_event(tools: Sequence[ToolSpec]) -> LogEvent:
    return result_event("tools", [tool.to_openai() for tool in tools])


def file_events(file: Path | None) -> list[LogEvent]:
    """Return the event that records the Python file of a user's task set; [] if there is no such file."""
    return [] if file is None else [result_event("file", os.path.abspath(file))]


def read_results(reader: RunReader, kind: ResultKind) -> Iterator[Any]:
    """Yield the JSON values of one kind, in the order in which they were recorded."""
    for event in reader.events():
        if event.kind == kind:
            yield json.loads(event.detail)


def read_tools(reader: RunReader) -> list[dict[str, Any]]:
    """Return the tools of the training environment, in the OpenAI format; [] if the run did not record its tools."""
    tools: list[list[dict[str, Any]]] = list(read_results(reader, "tools"))
    return tools[-1] if tools else []  # the tools of the last segment


def read_hardware(reader: RunReader) -> Mapping[str, Any]:
    """Return the hardware of the last start or resumption of a run; {} if it was not recorded.

    Example:
        {"processor": "AMD EPYC 9654", "cores": 16, "gpus": ["NVIDIA H200"], "torch": "2.13.0"}
    """
    found: list[Mapping[str, Any]] = list(read_results(reader, "hardware"))
    return found[-1] if found else {}


def read_file(reader: RunReader) -> Path | None:
    """Return the Python file that defines the task set of a run; None if the run recorded no such file."""
    files = list(read_results(reader, "file"))
    return Path(files[-1]) if files else None

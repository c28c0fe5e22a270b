"""Write trajectories as Parquet files for the package ``datasets``, or as JSON lines in the OpenAI format."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from agent_r1.core.errors import import_extra
from agent_r1.core.messages import Message, to_openai
from agent_r1.core.trajectory import Branch, Trajectory, Turn
from agent_r1.export.config import ExportConfig
from agent_r1.store.reader import AttemptFilter, AttemptSummary, RunReader, read_tools
from agent_r1.training.metrics import sum_rewards

PAGE = 2000
"""The number of attempts whose summaries are read from the database at once."""


@dataclass(frozen=True, slots=True)
class ExportedAttempt:
    """An ended attempt, and the environment's tools in the OpenAI format."""

    summary: AttemptSummary
    trajectory: Trajectory
    tools: Sequence[Mapping[str, Any]]

    def tools_of(self, conversation: Branch) -> list[dict[str, Any]]:
        if conversation.tools is None:
            return [dict(tool) for tool in self.tools]
        return [tool.to_openai() for tool in conversation.tools]

    def facts(self) -> dict[str, Any]:
        """Return ids, status, rewards and fate of the attempt as JSON values.

        The fate is "trained", "dropped" or "pending" (neither so far).
        """
        summary, trajectory = self.summary, self.trajectory
        return {
            "id": str(trajectory.attempt),
            "run": trajectory.attempt.run,
            "task": trajectory.task_id,
            "split": summary.split,
            "group": trajectory.attempt.group_id,
            "sample": trajectory.attempt.sample_index,
            "retry": trajectory.attempt.retry,
            "version": summary.version,
            "step": summary.step,
            "fate": summary.fate or "pending",
            "fate_reason": summary.fate_reason,
            "status": trajectory.status.value,
            "status_reason": trajectory.reason,
            "truncated": trajectory.truncated,
            "seconds": trajectory.seconds,
            "answer": trajectory.answer,
            "reward": finite(summary.reward),
            "rewards": sum_rewards(trajectory),
        }


def read_attempts(reader: RunReader, config: ExportConfig) -> Iterator[ExportedAttempt]:
    """Yield the ended attempts that ``config`` selects, in the order of their start.

    Only one trajectory is in memory at a time.
    """
    tools = read_tools(reader)
    where = AttemptFilter(split=config.split, status=config.status, fate=config.fate, min_reward=config.min_reward)
    for offset in count(0, PAGE):
        page = reader.list_attempts(where, limit=PAGE, offset=offset)
        for summary in page:
            if config.first_step is not None and (summary.step is None or summary.step < config.first_step):
                continue
            if config.last_step is not None and (summary.step is None or summary.step > config.last_step):
                continue
            if (trajectory := reader.trajectory(summary.attempt)) is not None:
                yield ExportedAttempt(summary, reader.with_images(trajectory), tools)
        if len(page) < PAGE:
            return


def openai_messages(messages: Sequence[Message], *, arguments_as_text: bool) -> list[dict[str, Any]]:
    """Return a conversation in the OpenAI format, with the arguments of calls as JSON text or as objects."""
    converted = [to_openai(message) for message in messages]
    for call in (call for message in converted for call in message.get("tool_calls", ())) if arguments_as_text else ():
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return converted


def finite(value: float | None) -> float | None:
    """Return ``value``, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def valid_text(value: Any) -> Any:
    """Return a JSON value that can be written as UTF-8.

    Each lone surrogate is escaped, as ``\\udc80``. NaN and infinite numbers become None.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {valid_text(key): valid_text(item) for key, item in value.items()}
    if isinstance(value, float):
        return finite(value)
    return [valid_text(item) for item in value] if isinstance(value, list | tuple) else value


ROWS_PER_FILE, ROWS_PER_GROUP = 10_000, 200
"""The maximum number of rows in a Parquet file, and in memory at once."""

OPENAI_FILE = "trajectories.jsonl"

FACT_TYPES: Mapping[str, str] = {
    **dict.fromkeys(
        ("id", "run", "task", "split", "fate", "fate_reason", "status", "status_reason", "answer"), "string"
    ),
    **dict.fromkeys(("group", "sample", "retry", "version", "step", "conversation"), "int64"),
    **{"truncated": "bool", "seconds": "float64"},
}
"""The types of the columns with facts about an attempt or a conversation, in the notation of ``datasets``. The columns
of rewards are not listed here."""

OPENAI_COLUMNS: Sequence[Mapping[str, Any]] = (
    {"name": "messages", "list": "json"},
    {"name": "tools", "list": "json"},
    {"name": "reward", "dtype": "float64"},
    {"name": "rewards", "dtype": "json"},
    {"name": "metadata", "struct": [{"name": name, "dtype": dtype} for name, dtype in FACT_TYPES.items()]},
)
"""The columns of the JSON lines, for the header of a dataset card.

Without the header, ``datasets`` infers the columns from the first lines, and refuses a line with more columns.
"""


def write_openai(folder: Path, attempts: Iterable[ExportedAttempt]) -> int:
    """Write ``trajectories.jsonl`` to ``folder``, one line per conversation. Return the number of lines."""
    count = 0
    with (folder / OPENAI_FILE).open("w", encoding="utf-8", newline="\n") as file:
        for attempt, conversation, facts in _conversations(attempts):
            line = {
                "messages": openai_messages(conversation.messages, arguments_as_text=True),
                "tools": attempt.tools_of(conversation),
                "reward": facts.pop("reward"),
                "rewards": facts.pop("rewards"),
                "metadata": facts,
            }
            file.write(json.dumps(valid_text(line), ensure_ascii=False) + "\n")
            count += 1
    return count


def write_parquet(folder: Path, attempts: Iterable[ExportedAttempt]) -> int:
    """Write ``data/train-*.parquet`` to ``folder``, one row per conversation. Return the number of rows."""
    datasets, parquet = import_extra("datasets", "datasets"), import_extra("pyarrow.parquet", "datasets")
    features = _features(datasets)
    (folder / "data").mkdir()
    count = 0
    rows = map(_row, _conversations(attempts))
    groups = iter(lambda: list(islice(rows, ROWS_PER_GROUP)), [])
    for number, first in enumerate(groups):
        with parquet.ParquetWriter(folder / "data" / f"train-{number:05}.parquet", features.arrow_schema) as writer:
            for group in chain([first], islice(groups, ROWS_PER_FILE // ROWS_PER_GROUP - 1)):
                table = datasets.Dataset.from_list(group, features=features).data.table
                writer.write_table(table.select(features.arrow_schema.names).cast(features.arrow_schema))
                count += len(group)
    return count


_Exported = tuple[ExportedAttempt, Branch, dict[str, Any]]
"""An attempt, one of its conversations, and the facts about both."""


def _conversations(attempts: Iterable[ExportedAttempt]) -> Iterator[_Exported]:
    for attempt in attempts:
        for number, conversation in enumerate(attempt.trajectory.branches):
            yield attempt, conversation, {**attempt.facts(), "conversation": number}


def _row(exported: _Exported) -> dict[str, Any]:
    attempt, conversation, facts = exported
    row = {
        **facts,
        "messages": openai_messages(conversation.messages, arguments_as_text=False),
        "tools": attempt.tools_of(conversation),
        "turns": [_turn_record(turn) for turn in conversation.turns],
    }
    valid: dict[str, Any] = valid_text(row)
    return valid


def _turn_record(turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "parent": turn.parent,
        "kind": turn.kind,
        "finish_reason": turn.finish_reason,
        "new_ids": turn.new_ids,
        "action_ids": turn.action_ids,
        "logprobs": turn.logprobs,
        "text": turn.action.text,
        "rewards": turn.rewards,
        "call_rewards": turn.call_rewards,
    }


def _features(datasets: Any) -> Any:
    text, integer, number = datasets.Value("string"), datasets.Value("int64"), datasets.Value("float64")
    json_value = datasets.Json()
    turn = {
        "index": integer,
        "parent": integer,
        "kind": text,
        "finish_reason": text,
        "new_ids": datasets.List(datasets.Value("int32")),
        "action_ids": datasets.List(datasets.Value("int32")),
        "logprobs": datasets.List(number),
        "text": text,
        "rewards": json_value,
        "call_rewards": datasets.List(json_value),
    }
    names = {
        **{name: datasets.Value(dtype) for name, dtype in FACT_TYPES.items()},
        **{"reward": number, "rewards": json_value},
        **{"messages": datasets.List(json_value), "tools": datasets.List(json_value), "turns": datasets.List(turn)},
    }
    return datasets.Features(names)


def write_metrics(folder: Path, reader: RunReader) -> int:
    """Write ``metrics.csv`` and ``metrics.jsonl`` to ``folder``, one line per step. Return the number of steps.

    A metric without a value is an empty cell in CSV, and is absent in JSON. NaN is ``nan`` in CSV and null in JSON.
    """
    names = [valid_text(name) for name in reader.metric_names()]
    count = 0
    with (
        (folder / "metrics.csv").open("w", encoding="utf-8", newline="") as table,
        (folder / "metrics.jsonl").open("w", encoding="utf-8", newline="\n") as lines,
    ):
        rows = csv.DictWriter(table, ["step", *names])
        rows.writeheader()
        for step in reader.metrics():
            values = {valid_text(name): value for name, value in step.values.items()}
            rows.writerow({"step": step.step, **values})
            numbers = {name: finite(value) for name, value in values.items()}
            lines.write(json.dumps({"step": step.step, **numbers}, ensure_ascii=False) + "\n")
            count += 1
    return count

"""Write trajectories as Parquet files for the package ``datasets``, or as JSON lines in the OpenAI format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from agent_r1.core.packages import import_extra
from agent_r1.core.trajectory import Conversation
from agent_r1.export.attempts import ExportedAttempt, openai_messages, turn_record, valid_text

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
    groups = _groups(map(_row, _conversations(attempts)), ROWS_PER_GROUP)
    for number, first in enumerate(groups):
        with parquet.ParquetWriter(folder / "data" / f"train-{number:05}.parquet", features.arrow_schema) as writer:
            for group in chain([first], islice(groups, ROWS_PER_FILE // ROWS_PER_GROUP - 1)):
                table = datasets.Dataset.from_list(group, features=features).data.table
                writer.write_table(table.select(features.arrow_schema.names).cast(features.arrow_schema))
                count += len(group)
    return count


def _groups(rows: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    while group := list(islice(rows, size)):
        yield group


_Exported = tuple[ExportedAttempt, Conversation, dict[str, Any]]
"""An attempt, one of its conversations, and the facts about both."""


def _conversations(attempts: Iterable[ExportedAttempt]) -> Iterator[_Exported]:
    for attempt in attempts:
        for number, conversation in enumerate(attempt.trajectory.conversations):
            yield attempt, conversation, {**attempt.facts(), "conversation": number}


def _row(exported: _Exported) -> dict[str, Any]:
    attempt, conversation, facts = exported
    row = {
        **facts,
        "messages": openai_messages(conversation.messages, arguments_as_text=False),
        "tools": attempt.tools_of(conversation),
        "turns": [turn_record(turn) for turn in conversation.turns],
    }
    valid: dict[str, Any] = valid_text(row)
    return valid


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

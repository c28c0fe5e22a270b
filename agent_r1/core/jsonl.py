"""Read data files row by row, so that whatever is wrong is said with its file and row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agent_r1.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """One row of a file. ``number`` counts from 1: entries of a JSON list, or lines of a JSONL file.

    Example:
        JsonRecord(Path("dev.jsonl"), 17, {"question": "Who rules Alba?", "answer": "Bruno"})
    """

    path: Path
    number: int
    values: Mapping[str, Any]

    def fault(self, got: str, do: str) -> InvalidInput:
        """The error that names this row."""
        return InvalidInput(f"{self.path}, row {self.number}", got=got, do=do)

    def text(self, *names: str) -> str:
        """The text under the first of ``names`` that is there. Raises InvalidInput where it is missing or blank."""
        value = next((self.values[name] for name in names if name in self.values), None)
        if isinstance(value, str) and value.strip():
            return value.strip()
        raise self.fault(f"no {names[0]}", f"give every row a text under {names[0]!r}")


def read_records(path: Path) -> Iterator[JsonRecord]:
    """The rows of a JSON list or of a JSONL file; which of the two it is, its first character says.

    Raises InvalidInput: no such file, broken JSON, not UTF-8 (each with the line), a row that is no object, or no rows.
    """
    count = 0
    try:
        with path.open("rb") as file:
            for number, values in _json_list(path, file) if _opens_list(file) else _json_lines(path, file):
                if not isinstance(values, dict):
                    raise InvalidInput(
                        f"{path}, row {number}", got=type(values).__name__, do="make every row a JSON object"
                    )
                count += 1
                yield JsonRecord(path, number, values)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not count:
        raise InvalidInput(str(path), got="an empty file", do="give a file with at least one row")


def read_record(path: Path) -> JsonRecord:
    """The one row of a file that holds a single JSON object. Raises InvalidInput as :func:`read_records` does."""
    try:
        values = _parsed(path, path.read_bytes(), 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not isinstance(values, dict):
        raise InvalidInput(str(path), got=type(values).__name__, do="make it a JSON object")
    return JsonRecord(path, 1, values)


def _unreadable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(str(path), got=error.strerror or str(error), do="give the path of a readable file")


def _opens_list(file: BinaryIO) -> bool:
    opens = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    file.seek(0)
    return opens


def _json_list(path: Path, file: BinaryIO) -> Iterator[tuple[int, Any]]:
    yield from enumerate(_parsed(path, file.read(), 1), start=1)


def _json_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, _parsed(path, line, number)


def _parsed(path: Path, data: bytes, first_line: int) -> Any:
    """The JSON value of ``data``, which starts on line ``first_line`` of the file."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise InvalidInput(
            f"{path}, line {line}", got="bytes that are not UTF-8", do="save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InvalidInput(f"{path}, line {line}", got=f"broken JSON ({error.msg})", do="mend that line") from error
    except (RecursionError, ValueError) as error:
        raise InvalidInput(
            f"{path}, line {first_line}", got=f"JSON that cannot be read ({type(error).__name__})", do="mend that line"
        ) from error

"""Read JSON and JSONL data files. Every error names the file and the row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import open_regular


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """One JSON object of a data file.

    ``number`` is counted from 1: the position in a JSON list, or the line in a JSONL file.

    Example:
        JsonRecord(path=Path("dev.jsonl"), number=17, values={"question": "Who rules Alba?", "answer": "Bruno"})
    """

    path: Path
    number: int
    values: Mapping[str, Any]

    def error(self, got: str, do: str) -> InvalidInput:
        """Return an error that names the file and the row.

        The argument ``got`` describes the problem. The argument ``do`` describes the correction.

        Example:
            "dev.jsonl, row 17: got no answer; give every row a text under 'answer'"
        """
        return InvalidInput(f"{self.path}, row {self.number}", got=got, do=do)

    def get_text(self, *names: str) -> str:
        """Return the stripped text of the first field in ``names`` that the record has.

        Raise InvalidInput if the record has none of these fields, or if the found field is blank or not text.
        """
        value = next((self.values[name] for name in names if name in self.values), None)
        if isinstance(value, str) and value.strip():
            return value.strip()
        raise self.error(f"no {names[0]}", f"give every row a text under {names[0]!r}")


def read_records(path: Path) -> Iterator[JsonRecord]:
    """Yield the records of a data file: a JSON list if the file begins with ``[``, otherwise JSONL.

    Raise InvalidInput if the file cannot be read, is empty, is not JSON in UTF-8, or has a row that is not an object.
    """
    empty = True
    try:
        with open_regular(path) as file:
            rows = enumerate(_parse(path, file.read(), 1), start=1) if _starts_list(file) else _parse_lines(path, file)
            for number, values in rows:
                if not isinstance(values, dict):
                    raise InvalidInput(
                        f"{path}, row {number}", got=type(values).__name__, do="make every row a JSON object"
                    )
                empty = False
                yield JsonRecord(path, number, values)
    except OSError as error:
        raise _unreadable(path, error) from error
    if empty:
        raise InvalidInput(str(path), got="an empty file", do="give a file with at least one row")


def read_record(path: Path) -> JsonRecord:
    """Return the JSON object in a file. Raise InvalidInput if the file cannot be read or is not one JSON object."""
    try:
        with open_regular(path) as file:
            values = _parse(path, file.read(), 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not isinstance(values, dict):
        raise InvalidInput(str(path), got=type(values).__name__, do="make it a JSON object")
    return JsonRecord(path, 1, values)


def _unreadable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(str(path), got=error.strerror or str(error), do="give the path of a readable file")


def _starts_list(file: BinaryIO) -> bool:
    start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()  # without the byte order mark
    file.seek(0)
    return start.startswith(b"[")


def _parse_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, _parse(path, line, number)


def _parse(path: Path, data: bytes, first_line: int) -> Any:
    """Parse JSON in UTF-8. Raise InvalidInput with the line in the file if this fails.

    ``data`` starts at the line ``first_line`` of the file.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"))
        if b"\\u" in data:  # half a character (a lone surrogate) cannot be written or hashed
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidInput(
            f"{path}, line {first_line}", got=f"half a character, {half!a}", do="write the whole surrogate pair"
        ) from error
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise InvalidInput(
            f"{path}, line {line}", got="bytes that are not UTF-8", do="save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InvalidInput(f"{path}, line {line}", got=f"broken JSON ({error.msg})", do="fix that line") from error
    except (RecursionError, ValueError) as error:
        raise InvalidInput(
            f"{path}, line {first_line}", got=f"JSON that cannot be read ({type(error).__name__})", do="fix that line"
        ) from error

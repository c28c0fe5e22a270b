"""Damaged and foreign files in every place that reads one."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

from hostile_options import AGENT, Invocation

from agent_r1.cli import main

TRAIN = ("train", "--model", "tiny-base", "--run", "new", "--steps", "1", "--quiet", "--taskset")
OWN = ("train", "agent.py", "--run", "new", "--steps", "1", "--quiet")
FILE = "FILE"
"""Stands for the hostile file in the arguments of a place."""

PLACES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "hotpotqa": (".json", (*TRAIN, "hotpotqa", "--data", FILE)),
    "musique": (".jsonl", (*TRAIN, "musique", "--data", FILE, "--corpus", "corpus.jsonl")),
    "gsm8k": (".jsonl", (*TRAIN, "math", "--sandbox", "none", "--data", FILE)),
    "math": (".jsonl", (*TRAIN, "math", "--sandbox", "none", "--data", FILE)),
    "humaneval": (".jsonl", (*TRAIN, "code", "--sandbox", "none", "--data", FILE)),
    "mbpp": (".jsonl", (*TRAIN, "code", "--sandbox", "none", "--data", FILE)),
    "passages": (".jsonl", (*TRAIN, "hotpotqa", "--data", "hotpotqa.json", "--corpus", FILE)),
    "served": (".jsonl", ("retriever", "--port", "0", "--corpus", FILE)),
    "mixture": (".toml", (*TRAIN, "multihop", "--data", FILE)),
    "search": (".toml", (*TRAIN, "hotpotqa", "--data", "hotpotqa.json", "--corpus", FILE)),
    "config": (".toml", (*OWN, "--config", FILE)),
    "agent": (".py", ("train", FILE, *OWN[2:])),
    "checked": (".py", ("check", FILE)),
    "algorithm": (".py", (*OWN, "--algorithm", f"{FILE}:MINE")),
    "model": ("", (*OWN, "--model", f"./{FILE}")),
}
"""The suffix of the file and the arguments of each place."""

HOTPOT = {
    "_id": "5a7a",
    "question": "Who rules Alba in 1?",
    "answer": "Bruno",
    "context": [["Alba", ["Alba is ruled by Bruno."]]],
    "supporting_facts": [["Alba", 0]],
    "evidences": [["Alba", "ruler", "Bruno"]],
}
MUSIQUE = {
    "id": "2hop__1",
    "question": "Who rules Alba in 1?",
    "answer": "Bruno",
    "answer_aliases": ["B."],
    "paragraphs": [{"title": "Alba", "paragraph_text": "A river.", "is_supporting": True}],
    "question_decomposition": [{"answer": "Bruno"}],
}
HUMANEVAL = {
    "task_id": "HumanEval/1",
    "prompt": 'def add(a, b):\n    """Add.\n    >>> add(1, 2)\n    3\n    """\n',
    "entry_point": "add",
    "test": "def check(f):\n    assert f(1, 2) == 3",
    "canonical_solution": "    return a + b",
}
MBPP = {
    "task_id": 1,
    "text": "Add 1.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3"],
}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "hotpotqa": HOTPOT,
    "musique": MUSIQUE,
    "gsm8k": {"question": "What is 1 + 2?", "answer": "It is 3.\n#### 3"},
    "math": {"problem": "What is 1 + 2?", "solution": r"\boxed{3}", "answer": "3", "unique_id": "a/1"},
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
    "passages": {"title": "Alba", "text": "A river."},
    "served": {"title": "Alba", "text": "A river."},
}
"""A right row of each format; a file has several, which differ by their number."""

TOML: Mapping[str, str] = {
    "mixture": '[train.a]\ndata = "hotpotqa.json"\ncount = 1\n[test.b]\ndata = "hotpotqa.json"\ncount = 1\n',
    "search": 'corpus = "corpus.jsonl"\n',
    "config": "group_size = 2\n[trainer]\nlearning_rate = 1e-3\n[algorithm]\nname = 'grpo'\n",
}

VALUES: tuple[str, ...] = (
    *("null", "true", "-1", "1e999", "NaN", "-Infinity", "[]", "{}", '""', '" "', r'"\ud800"', r'"\u0000"', "[null]"),
    *('{"a": [1]}', "[[[[]]]]", "9" * 5000, "[" * 300 + "]" * 300, '[["a", 1], 2]', '"' + "x" * 100_000 + '"'),
)
"""JSON texts that replace a field's value."""

NO_VALUE = ("null", "true", "1e999", "NaN", "-Infinity", "[]", "{}", '""', '" "', "[null]", "[[[[]]]]")
"""Values that no gold answer may have."""


def rows_file(place: str, field: str = "", text: str = "") -> bytes:
    """Return four rows of a place's format; ``text`` replaces the value of ``field`` in the second one."""
    rows = []
    for number in range(4):
        row = json.loads(json.dumps(ROWS[place]).replace("1", str(number + 1)))
        if field and number == 1:
            row[field] = "HOSTILE"
        rows.append(json.dumps(row).replace('"HOSTILE"', text))
    return ("[" + ",\n".join(rows) + "]" if place == "hotpotqa" else "\n".join(rows) + "\n").encode()


def right_file(place: str) -> bytes:
    """Return a file that is accepted in a place."""
    if place in ROWS:
        return rows_file(place)
    if place in TOML:
        return TOML[place].encode()
    algorithm = "from agent_r1.algorithms.presets import GRPO\nMINE = GRPO\n"
    return (algorithm if place == "algorithm" else AGENT).encode()


def _socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(os.path.relpath(path))


FOREIGN: Mapping[str, Callable[[Path, bytes], object]] = {
    "missing": lambda path, right: None,
    "folder": lambda path, right: path.mkdir(),
    "FIFO": lambda path, right: os.mkfifo(path),
    "socket": lambda path, right: _socket(path),
    "endless device": lambda path, right: path.symlink_to("/dev/zero"),
    "null device": lambda path, right: path.symlink_to("/dev/null"),
    "link to itself": lambda path, right: path.symlink_to(path),
    "link to nothing": lambda path, right: path.symlink_to("nothing"),
    "no permission": lambda path, right: (path.write_bytes(right), path.chmod(0)),
    "empty": lambda path, right: path.write_bytes(b""),
    "blank": lambda path, right: path.write_bytes(b" \n\r\n\t"),
    "byte order mark": lambda path, right: path.write_bytes(b"\xef\xbb\xbf"),
    "byte order mark and right": lambda path, right: path.write_bytes(b"\xef\xbb\xbf" + right),
    "CRLF": lambda path, right: path.write_bytes(right.replace(b"\n", b"\r\n")),
    "CR": lambda path, right: path.write_bytes(right.replace(b"\n", b"\r")),
    "UTF-16": lambda path, right: path.write_bytes(right.decode().encode("utf-16")),
    "Latin-1": lambda path, right: path.write_bytes(right.replace(b"Alba", b"\xc4lba") + b"\xff"),
    "NUL bytes": lambda path, right: path.write_bytes(right.replace(b" ", b"\0")),
    "only NUL bytes": lambda path, right: path.write_bytes(bytes(100)),
    "random bytes": lambda path, right: path.write_bytes(random.Random(0).randbytes(5000)),
    "compressed": lambda path, right: path.write_bytes(gzip.compress(right)),
    "half": lambda path, right: path.write_bytes(right[: len(right) // 2]),
    "a page": lambda path, right: path.write_bytes(b"<!DOCTYPE html>\n<html><body>404</body></html>\n"),
    "deep lists": lambda path, right: path.write_bytes(b"[" * 100_000),
    "deep objects": lambda path, right: path.write_bytes(b'{"a":' * 100_000),
    "deep keys": lambda path, right: path.write_bytes(b"a" + b".a" * 5000 + b" = 1\n"),
    "deep brackets": lambda path, right: path.write_bytes(b"a = " + b"[" * 5000 + b"]" * 5000 + b"\n"),
    "a line of 50 MB": lambda path, right: path.write_bytes(b"x" * 50_000_000),
    "a number": lambda path, right: path.write_bytes(b"12"),
    "a text": lambda path, right: path.write_bytes(b'"text"'),
    "a list of lists": lambda path, right: path.write_bytes(b"[[1], [2]]"),
    "rows of null": lambda path, right: path.write_bytes(b"null\nnull\nnull\n"),
}
"""What is in the place of a file. The second argument is a file that is right there."""

SETTINGS: tuple[str, ...] = (
    *("trainer = 3", "trainer = []", "steps = {a = 1}", "steps = 2020-01-01", "steps = nan", "steps = 1e400", "= 1"),
    *("algorithm = 3", "algorithm = []", "[algorithm]\nloss = 3", "[algorithm]\nloss = [1]", "[algorithm.loss]\nx = 1"),
    *("[algorithm]\nname = 3", "[algorithm.kl]\ncoefficient = true", "[algorithm.kl]\ncoefficient = inf"),
    *(
        "[algorithm]\nepochs = 1e30",
        "[algorithm]\nepochs = 07:32:00",
        "reward_weights = 3",
        "[reward_weights]\nem = nan",
    ),
    *("[trainer]\nbetas = [1, 2]", "[trainer]\nbetas = 3", "[row]\nname = 'grpo'", "[view]\nrule = 'window'"),
    *(
        "splits = 'a'",
        "splits = [1, 2]",
        "model = 3",
        "model = ['a']",
        "'' = 1",
        '"a.b" = 1',
        '"\\u0000" = 1',
        "a = ''",
    ),
    *("[train.a]\ndata = 3", "[test.a]\ndata = ''\n", "[test.a]\ncount = 1", "[test.train]\ndata = 'hotpotqa.json'"),
    *("corpus = 3", "corpus = ''", "corpus = 'agent.py'", "encoder = 'nothing'", "corpus = 'corpus.jsonl'\nbatch = 2"),
)
"""TOML files, each given in every place that reads one."""

PROGRAMS: tuple[str, ...] = (
    *("env = 3", "tasks = 3", "tasks = []", "tasks = [1]", "tasks = (t for t in tasks)", "del tasks", "del env"),
    *("raise ValueError('\\ud800')", "raise KeyError", "import nothing", "raise SystemExit(3)", "x = = 1", "1 / 0"),
    *("tasks[0] = tasks[1]", "tasks = [Task(1, 'a'), Task(2, 'b')]", "tasks = [Task('\\ud800', 'a')]"),
    *(
        "tasks = [Task('a', '\\ud800')]",
        "tasks = [Task('a', 'b', {'answers': ('\\ud800',)})]",
        "tasks = [Task('a', 3)]",
    ),
    *("tasks = [Task('a', 'b', 3)]", "tasks = [Task('a', 'b', split=3)]", "tasks = [Task('a', 'x' * 50_000_000)]"),
    *("tasks = [Task('a' * 50_000_000, 'b')]", "tasks = [Task('a', '')]", "tasks = [Task('a', [])]", "tasks = 'abc'"),
    *("tasks = [Task('a', 'b', split='\\ud800'), *tasks]", "rewards = 3", "rewards = ['a']", "rewards = 'a'"),
    *(
        "solutions = 3",
        "solutions = lambda task: 1 / 0",
        "solutions = lambda task: None",
        "data = []\ndata.append(data)",
    ),
    *("d = {}\nd['d'] = d\ntasks = [Task('a', 'b', d)]", "env = ToolEnv([], [])", "env.open = None", "MINE = 3"),
    *(
        "from dataclasses import replace\nMINE = GRPO.model_copy(update={'loss': 3})",
        "MINE = GRPO.model_copy(update={'epochs': -1})",
    ),
)
"""Lines at the end of a Python file."""


def prepare(place: Path) -> Path:
    """Make a folder to work in, with a run that took one step."""
    (place / "runs").mkdir()
    (place / "agent.py").write_text(AGENT, "utf-8")
    (place / "corpus.jsonl").write_text('{"title": "Alba", "text": "A river."}\n', "utf-8")
    (place / "hotpotqa.json").write_bytes(rows_file("hotpotqa"))
    before = os.getcwd()
    os.chdir(place)
    small = ("--group_size", "2", "--groups_per_step", "2", "--max_tokens", "8", "--evaluate_n", "1")
    with redirect_stdout(io.StringIO()):
        code = main(
            (
                "train",
                "agent.py",
                "--run",
                "finished",
                "--steps",
                "1",
                "--checkpoint_every",
                "1",
                "--profile",
                "1",
                "--quiet",
                *small,
            )
        )
    os.chdir(before)
    assert code == 0, "the run that is damaged later could not be made"
    return place


def file_invocations(folder: Path, per_place: int | None, generator: random.Random) -> Iterator[Invocation]:
    """Yield invocations that read a hostile file, which exists while the invocation is in use.

    ``per_place`` limits the number for each place and kind; ``generator`` then draws them.
    """
    for place, (suffix, arguments) in PLACES.items():
        cases: dict[str, Callable[[Path], object]] = {
            name: lambda path, make=make, place=place: make(path, right_file(place)) for name, make in FOREIGN.items()
        }
        cases |= {name: lambda path, data=data: path.write_bytes(data) for name, data in _contents(place)}
        drawn = cases if per_place is None else generator.sample(sorted(cases), per_place)
        for number, name in enumerate(drawn):
            path = folder / f"{place}-{number}{suffix}"
            cases[name](path)
            given = tuple(word.replace(FILE, path.name) for word in arguments)
            yield Invocation(f"{place}: {name[:80]!r}", given, name.startswith("no answer: "))
            _remove(path)
    yield from _run_invocations(folder, per_place, generator)


def _contents(place: str) -> Iterator[tuple[str, bytes]]:
    """Yield files with a hostile part by its name."""
    if place in ROWS:
        for field in ROWS[place]:
            for value in VALUES:
                refused = field == "answer" and value in NO_VALUE
                name = f"{'no answer: ' if refused else ''}{field} = {value}"
                yield name, rows_file(place, field, value)
        yield "the same row twice", rows_file(place) + rows_file(place)
    for line in SETTINGS if place in TOML else ():
        yield line, line.encode()
        yield (
            f"right, then {line}",
            f"{line}\n{TOML[place]}".encode() if "[" not in line else TOML[place].encode() + line.encode(),
        )
    for line in PROGRAMS if place in ("agent", "checked", "algorithm") else ():
        yield line, right_file(place) + line.encode()


CONTENTS: Mapping[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "deep": b"[" * 100_000,
    "null": b"null",
    "random": bytes(99),
}
"""Contents that replace a file of a run; None: there is no such file."""


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "database half": lambda run: os.truncate(run / "run.db", (run / "run.db").stat().st_size // 2),
    "database empty": lambda run: (run / "run.db").write_bytes(b""),
    "database of random bytes": lambda run: (run / "run.db").write_bytes(random.Random(0).randbytes(9000)),
    "database zeroed in the middle": lambda run: _overwrite(run / "run.db", 0.5, bytes(4096)),
    "database a folder": lambda run: ((run / "run.db").unlink(), (run / "run.db").mkdir()),
    "database a FIFO": lambda run: ((run / "run.db").unlink(), os.mkfifo(run / "run.db")),
    "database without permission": lambda run: (run / "run.db").chmod(0),
    "no database": lambda run: (run / "run.db").unlink(),
    **{
        statement: lambda run, statement=statement: _change(run, statement)
        for statement in (
            "DELETE FROM meta",
            "UPDATE meta SET value = '99'",
            "UPDATE meta SET value = 'x'",
            "DELETE FROM segments",
            "UPDATE segments SET config = 'null'",
            "UPDATE segments SET config = '{}'",
            "UPDATE segments SET config = '" + "[" * 20000 + "'",
            'UPDATE segments SET config = replace(config, \'"steps": 1\', \'"steps": "x"\')',
            "UPDATE segments SET config = replace(config, 'grpo', 'typo')",
            "UPDATE segments SET config = x'ff00'",
            "UPDATE outcomes SET start = x'00'",
            "UPDATE turns SET tokens = x'00'",
            "UPDATE turns SET content = x'00'",
            "UPDATE rewards SET value = 'x'",
            "UPDATE metrics SET value = 'x'",
            "DELETE FROM events",
            "DROP TABLE events",
        )
    },
    **{
        f"{name} {how}": lambda run, name=name, data=data: _replace(run, name, data)
        for name in (
            "config.json",
            "manifest.json",
            "progress.json",
            "monitor.json",
            "trainer.json",
            "trainer.safetensors",
        )
        for how, data in CONTENTS.items()
    },
    **{
        f"model's {name} {how}": lambda run, name=name, data=data: _replace(run / "model", name, data)
        for name in ("config.json", "tokenizer.json", "model.safetensors", "tokenizer_config.json")
        for how, data in CONTENTS.items()
    },
}
"""What was done to the folder of a run."""


def _run_invocations(folder: Path, per_place: int | None, generator: random.Random) -> Iterator[Invocation]:
    commands = {
        "verify": ("verify", "damaged"),
        "digest": ("verify", "damaged", "--digest"),
        "eval": ("eval", "agent.py", "--model", "runs/damaged", "--evaluate_n", "1", "--quiet"),
        "resume": ("train", "agent.py", "--run", "damaged", "--resume", "--steps", "2", "--quiet"),
    }
    for command, arguments in commands.items():
        for name in DAMAGES if per_place is None else generator.sample(sorted(DAMAGES), per_place):
            damaged = folder / "runs" / "damaged"
            shutil.copytree(folder / "runs" / "finished", damaged)
            DAMAGES[name](damaged)
            yield Invocation(f"{command}: {name[:80]!r}", arguments)
            _remove(damaged)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _change(run: Path, statement: str) -> None:
    with closing(sqlite3.connect(run / "run.db")) as connection:
        for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        connection.execute(statement)
        connection.commit()


def _overwrite(file: Path, share: float, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(int(file.stat().st_size * share))
        opened.write(data)


def _replace(folder: Path, name: str, data: bytes | None) -> None:
    """Replace every file of a name below a folder; remove it if ``data`` is None."""
    for file in sorted(folder.rglob(name)):
        if data is None:
            file.unlink()
        else:
            file.write_bytes(data)

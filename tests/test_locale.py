"""Text is read and written in UTF-8, whatever the locale of the process."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shown_runs import write_run

ROOT = Path(__file__).parents[1]
OPENING = {"open": 1, "fdopen": 1, "TemporaryFile": 0, "NamedTemporaryFile": 0}
"""Functions that open files, and the position of the mode. As a method, `open` has its mode one place earlier."""

OTHER_OPENERS = ("os", "webbrowser", "pillow", "Pillow")
"""Modules whose function `open` opens no text."""


def unencoded(source: str) -> list[str]:
    """Return the calls in ``source`` whose encoding of text would be that of the locale."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if _depends_on_locale(call)]


def _depends_on_locale(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) <= (name == "write_text")
    if name in OPENING:
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        place = OPENING[name] - (name == "open" and bool(owner))
        mode = given.get("mode", call.args[place] if len(call.args) > place else None)
        if mode is None:  # without a mode, a method `open` can be anything
            return name in ("open", "fdopen") and owner in ("", "os") and not (owner == "os" and name == "open")
        is_text = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value
        return owner not in OTHER_OPENERS[name != "open" :] and is_text
    return any(ast.unparse(given[key]) == "True" for key in ("text", "universal_newlines") if key in given)


def test_every_text_file_and_pipe_has_an_encoding() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    sources = {name: (ROOT / name).read_text("utf-8") for name in listed.stdout.split()}
    assert len(sources) > 500
    assert {name: found for name, source in sources.items() if (found := unencoded(source))} == {}


@pytest.mark.parametrize(
    "call",
    [
        "place().read_text()",
        "(a / b).write_text(text)",
        "open(name)",
        "open(name, 'a')",
        "self.file.open('w')",
        "os.fdopen(number, 'w')",
        "tempfile.TemporaryFile('w+')",
        "NamedTemporaryFile(mode='w')",
        "subprocess.run(command, text=True)",
        "Popen(command, universal_newlines=True)",
    ],
)
def test_a_call_without_encoding_is_found(call: str) -> None:
    assert unencoded(call) == [ast.unparse(ast.parse(call))]
    assert unencoded(f"{call[:-1]}{'' if call.endswith('()') else ', '}encoding='utf-8')") == []


SESSION = """
import asyncio
from pathlib import Path
from agent_r1.config import read_toml
from agent_r1.retrieval.client import open_retriever
from agent_r1.sandbox.config import SandboxConfig
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.training.user_task import load_task_file

here = Path.cwd()
found = open_retriever(here / "corpus.jsonl").search(["Zoë"])
assert [passage.title for passage in found[0]] == ["Zoë"], ascii(found)
assert read_toml(here / "run.toml").values == {"data": "Zoë"}
assert load_task_file(here / "own.py", "none").tasks("train")[0].id == "Zoë"
ran = asyncio.run(Sandbox(SandboxConfig(level="none")).run("print('Zoë')"))
assert ran.stdout.text == "Zoë\\n", ascii(ran)
"""


def run_in_c_locale(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    own = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env={**plain, **own}, capture_output=True, encoding="utf-8", timeout=300
    )


def test_files_of_users_are_read_in_a_locale_without_utf8(tmp_path: Path) -> None:
    passage = {"title": "Zoë", "text": "Zoë sails."}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(passage, ensure_ascii=False) + "\n", "utf-8")
    (tmp_path / "run.toml").write_text('data = "Zoë"\n', "utf-8")
    own = "from agent_r1 import Message, Task, ToolEnv, exact_match\nenv = ToolEnv([], [exact_match])\n"
    own += "tasks = [Task('Zoë', (Message.user('Who?'),), {'answers': ('Zoë',)})]\n"
    (tmp_path / "own.py").write_text(own, "utf-8")
    (tmp_path / "session.py").write_text(SESSION, "utf-8")
    done = run_in_c_locale(tmp_path, "session.py")
    assert done.returncode == 0, done.stderr


def test_text_that_the_terminal_cannot_show_is_printed_as_escapes(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "demo", text="Zoë → 東京")
    done = run_in_c_locale(tmp_path, "-m", "agent_r1", "show", "demo", "worst")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"Zo\xeb \u2192 \u6771\u4eac" in done.stdout

"""Task sets are found by name or by path, and take the options that their function ``build`` declares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets import build, has_build, is_available

MODULE = """
from agent_r1.core.taskset import TaskSet
from agent_r1.envs.tool_env import ToolEnv

def build(seed, data=None):
    return TaskSet("own", ToolEnv([]), lambda split: (), (), recipe={"seed": seed, "data": data})
"""


def write(path: Path, text: str = MODULE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def test_a_path_of_a_file_or_of_a_folder_names_a_task_set(tmp_path: Path) -> None:
    file = write(tmp_path / "own_taskset.py")
    built = build(str(file), seed=3, data=Path("x"))
    assert (built.name, built.recipe) == (str(file), {"seed": 3, "data": Path("x")})
    # modules of one package import each other, from the folder that holds the whole package
    write(tmp_path / "own_package" / "__init__.py", "")
    write(tmp_path / "own_package" / "inner" / "__init__.py", "from own_package.other import build")
    write(tmp_path / "own_package" / "other.py")
    folder = str(tmp_path / "own_package" / "inner")
    assert build(folder).name == folder


def test_a_path_is_recognized_by_its_form_and_a_build_by_its_definition(tmp_path: Path) -> None:
    assert is_available("tinywiki") and is_available("environments/people") and is_available("own.py")
    assert not is_available("custom")
    assert has_build(write(tmp_path / "a.py"))
    assert not has_build(write(tmp_path / "b.py", "env, tasks = 1, 2")) and not has_build(tmp_path / "none.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "no function build; define build"),
        ("x =", "invalid syntax (line 1); fix the file"),
        ("\n\n1 / 0", "ZeroDivisionError: division by zero (line 3); fix the file"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 (line 2); fix the file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / f"broken_{len(message)}.py", text)
    with pytest.raises(InvalidInput, match=re.escape(f"{file}: got {message}")):
        build(str(file))


def test_a_missing_path_and_a_name_that_python_uses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="got none/at_all; give a Python file, or a folder with __init__"):
        build("none/at_all")
    with pytest.raises(InvalidInput, match="a name that Python already uses"):
        build(str(write(tmp_path / "json.py")))


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'tinywiki'"):
        build("tiniwiki")
    with pytest.raises(InvalidInput, match="did you mean 'environments/code_repair'"):
        build("code-repair")
    with pytest.raises(InvalidInput, match="use one of: tinywiki, hotpotqa"):
        build("nothing")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tinywiki", {"data": Path("q.json")}, "data: got q.json; leave it out: tinywiki takes --seed"),
        ("tinywiki", {"corpus": "c.jsonl"}, "corpus: got c.jsonl; leave it out: tinywiki takes --seed"),
        ("math", {"encoder": "x"}, "encoder: got x; leave it out: math takes --seed, --data, --sandbox"),
        ("hotpotqa", {"sandbox": "none"}, "hotpotqa takes --seed, --data, --corpus, --encoder"),
        ("hotpotqa", {}, "--data for hotpotqa: got nothing; give it"),
        ("environments/wikifilm", {}, "--data for environments/wikifilm: got nothing; give it"),
    ],
)
def test_an_option_that_is_not_declared_and_one_that_is_missing_are_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        build(name, **options)

"""What README and the documents show is true: commands parse, code is the tested example, links and names exist."""

from __future__ import annotations

import ast
import asyncio
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from test_architecture import SEES

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.cli import parse
from agent_r1.config import Layer, resolve
from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.trajectory import AttemptId
from agent_r1.training.check import check
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.user_task import make_taskset

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
ALGORITHMS_PAGE = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
ENVIRONMENTS_PAGE = (ROOT / "docs" / "environments.md").read_text("utf-8")


def lines(pattern: str) -> list[Any]:
    return [
        pytest.param(match.group(1), id=f"{document.name}: {match.group(1)[:50]}")
        for document in DOCUMENTS
        for match in re.finditer(pattern, document.read_text("utf-8"), re.MULTILINE)
    ]


@pytest.mark.parametrize("command", lines(r"^    agent-r1 (\S.*?)(?:  .*)?$"))
def test_commands_parse(command: str) -> None:
    parse([word for word in shlex.split(command) if not re.fullmatch(r"\[.*\]", word)])


def test_a_wrong_command_is_found() -> None:
    with pytest.raises(click.UsageError):
        parse(["train", "--stepz", "3"])


@pytest.mark.parametrize("target", lines(r"^    make (\S+)"))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("file", lines(r"python ([\w./-]+\.py)"))
def test_scripts_exist(file: str) -> None:
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8")):
        assert target.startswith("https://") or (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_headings(document: Path) -> None:
    for path, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text("utf-8")):
        target = document.parent / path if path else document
        headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}, heading


def test_readme_shows_the_tested_example_and_it_is_short() -> None:
    example = (ROOT / "examples" / "ten_lines.py").read_text("utf-8")
    assert example in (ROOT / "README.md").read_text("utf-8")
    assert len(list(filter(None, example.splitlines()))) <= 11


def test_the_process_reward_in_readme_rewards_a_search_in_three_lines() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (shown,) = [block for block in blocks if "call_rewards" in block]
    assert len(list(filter(None, shown.splitlines()))) == 3
    names = runpy.run_path(str(ROOT / "examples" / "ten_lines.py"))
    exec(shown, names)
    calls = (ToolCall("a", "search", {"query": "Alaban"}, ""), ToolCall("b", "find", {}, ""))

    async def step() -> Any:
        episode = await names["env"].open(names["tasks"][0], RolloutContext(AttemptId("run", "task", 0, 0), 0))
        return await episode.step(Action(Message.assistant("", calls), ""))

    assert asyncio.run(step()).call_rewards == ({"found": 0.1}, {"found": 0.0})


def test_the_settings_in_readme_exist() -> None:
    options = re.findall(r"--([a-z_]+\.[a-z_.]+)(?: ([\w.-]+))?", (ROOT / "README.md").read_text("utf-8"))
    typed = {key: ast.literal_eval(value) for key, value in options if re.fullmatch(r"[\d.e-]+", value)}
    assert "trainer.learning_rate" in typed and "context_policy.name" in dict(options)
    resolve(TrainConfig, [Layer("README", {**typed, "context_policy.name": "window"})])


def test_the_documents_name_every_algorithm_and_no_other() -> None:
    assert set(re.findall(r"^\| `([^-`]\S*)` \| [\d-]", ALGORITHMS_PAGE, re.MULTILINE)) == set(ALGORITHMS)


def test_an_algorithm_of_ones_own_takes_a_file_of_forty_lines_which_the_documents_show() -> None:
    example = (ROOT / "examples" / "own_algorithm.py").read_text("utf-8")
    assert f"```python\n{example}```" in ALGORITHMS_PAGE
    assert len(example.splitlines()) <= 40


def test_the_solutions_in_the_documents_check_the_example() -> None:
    names: dict[str, Any] = {}
    for shown in re.findall(r"```python[^\n]*\n(.*?)```", ENVIRONMENTS_PAGE, re.DOTALL)[:3]:
        exec(shown, names)
    taskset = make_taskset(names["env"], names["tasks"], "example", "", (), names["solutions"])
    report = check(taskset, SilentProgress())
    assert report.passed and (report.gold.played, report.wrong.played) == (3, 3)


def test_the_rooms_of_the_architecture_are_those_that_the_imports_are_checked_against() -> None:
    table = ARCHITECTURE.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    rooms = {
        room: set(re.findall(r"\w+", imports))
        for room, imports in re.findall(r"^\| `(\w+)` \|.*\| ([\w, -]+) \|$", table, re.MULTILINE)
    }
    assert rooms == SEES


def names_in(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Yield the functions, classes, methods and variables that a module defines, by dotted name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from names_in(node, f"{prefix}{node.name}.")
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def exists(reference: str) -> bool:
    """Return whether ``room/file.py:Name.method`` exists, relative to the package or to the repository."""
    path, _, name = reference.partition(":")
    for file in (ROOT / "agent_r1" / path, ROOT / path):
        if file.exists():
            return not name or name in names_in(ast.parse(file.read_text("utf-8")))
    return False


REFERENCE = r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py(?::[A-Za-z_.]+)?|(?:[a-z_0-9]+/)+)`"


@pytest.mark.parametrize("reference", sorted(set(re.findall(REFERENCE, ARCHITECTURE)) - {"checkpoint/", "monitor/"}))
def test_files_and_functions_of_the_architecture_exist(reference: str) -> None:
    assert exists(reference)


def test_a_wrong_reference_is_found() -> None:
    assert not exists("training/loop.py:training_loop") and not exists("training/doctor.py")

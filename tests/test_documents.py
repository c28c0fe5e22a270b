"""What README and the documents show is true: commands parse, code is the tested example, links lead somewhere."""

import asyncio
import re
import runpy
import shlex
from pathlib import Path

import click
import pytest

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.cli import parse
from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.tasksets import TASKSETS
from agent_r1.training.check import check
from agent_r1.training.config import CheckConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.user_task import make_taskset

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()


def lines(pattern):
    return list(_lines(pattern))


def _lines(pattern):
    for document in DOCUMENTS:
        for match in re.finditer(pattern, document.read_text(), re.MULTILINE):
            yield pytest.param(match.group(1), id=f"{document.name}: {match.group(1)[:50]}")


@pytest.mark.parametrize("command", lines(r"^    agent-r1 (\S.*?)(?:  .*)?$"))
def test_commands_parse(command):
    words = [word for word in shlex.split(command) if not re.fullmatch(r"\[.*\]", word)]
    parse(words)


def test_a_wrong_command_is_seen():
    with pytest.raises(click.UsageError):
        parse(["train", "--stepz", "3"])


@pytest.mark.parametrize("target", lines(r"^    make (\S+)"))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("file", lines(r"python (\S+\.py)"))
def test_scripts_exist(file):
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


def test_readme_shows_the_tested_example_and_it_is_short():
    example = (ROOT / "examples" / "ten_lines.py").read_text()
    assert example in (ROOT / "README.md").read_text()
    assert len(example.splitlines()) <= 12


def test_the_process_reward_that_readme_shows_rewards_a_search_in_three_lines():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (shown,) = [block for block in blocks if "call_rewards" in block]
    assert len(list(filter(None, shown.splitlines()))) == 3
    names = runpy.run_path(str(ROOT / "examples" / "ten_lines.py"))
    exec(shown, names)
    calls = (ToolCall("a", "search", {"query": "Alaban"}, ""), ToolCall("b", "find", {}, ""))

    async def step():
        episode = await names["env"].open(names["tasks"][0], RolloutContext(AttemptId("run", "task", 0, 0), 0))
        return await episode.step(Action(Message.assistant("", calls), ""))

    assert asyncio.run(step()).call_rewards == ({"found": 0.1}, {"found": 0.0})


ALGORITHMS_PAGE = (ROOT / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)
def test_every_algorithm_is_documented_as_it_is(algorithm):
    level = "" if algorithm.ratio_level == "token" else f", ratio of the {algorithm.ratio_level}"
    loss, paper, deviations = algorithm.loss.name + level, algorithm.paper or "-", algorithm.deviations or "-"
    cells = (f"`{algorithm.name}`", paper, algorithm.advantage.formula, loss, deviations)
    assert f"| {' | '.join(cells)} |" in ALGORITHMS_PAGE


def test_the_documents_name_no_algorithm_that_is_not_there():
    assert set(re.findall(r"^\| `(\S+)` \| [\d-]", ALGORITHMS_PAGE, re.MULTILINE)) == set(ALGORITHMS)


def test_adding_an_algorithm_takes_one_file_of_forty_lines_which_the_documents_show():
    example = (ROOT / "examples" / "own_algorithm.py").read_text()
    assert f"```python\n{example}```" in ALGORITHMS_PAGE
    assert len(example.splitlines()) <= 40


def test_the_solutions_that_the_documents_show_prove_the_example():
    shown, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "worlds.md").read_text(), re.DOTALL)
    names = runpy.run_path(str(ROOT / "examples" / "ten_lines.py"))
    exec(shown, names)
    taskset = make_taskset(names["env"], names["tasks"], "example", "", (), names["solutions"])
    checked = check(CheckConfig(), taskset, SilentProgress())
    assert checked.passed and (checked.gold.played, checked.wrong.played) == (5, 10)


def test_the_documents_name_every_world():
    assert set(TASKSETS) <= set(
        re.findall(r"`(\S+?)`", (ROOT / "docs" / "worlds.md").read_text().partition("\n## ")[0])
    )

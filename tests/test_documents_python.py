"""The Python in the documents runs, its tasks can be trained on, and its settings exist."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from viewed_runs import write_run

import agent_r1.training.api as api
from agent_r1.core.environment import Env
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.training.config import TrainConfig
from agent_r1.training.tables import Table, TrainReport
from agent_r1.training.user_task import make_taskset

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, its attributes and its text."""

    language: str
    attributes: str
    text: str

    @property
    def title(self) -> str | None:
        found = re.search(r'title="(\S+)"', self.attributes)
        return found and found[1]


def blocks(page: Path) -> list[Block]:
    return [
        Block(*found) for found in re.findall(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    ]


def run(found: Sequence[Block]) -> None:
    """Run the Python blocks of a page as one program. Blocks with a title are also files in the working directory.

    A block with the attribute ``notest`` needs the hub or a trained model, and is only compiled. So is a block that
    needs a package of another project that is not installed.
    """
    names: dict[str, Any] = {"__name__": "page"}
    for block in found:
        if block.title:
            Path(block.title).write_text(block.text, "utf-8")
        if block.language != "python":
            continue
        code = compile(block.text, f"block {block.text[:40]!r}", "exec", dont_inherit=True)
        if "notest" in block.attributes.split():
            continue
        try:
            exec(code, names)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("agent_r1"):
                raise
        except InvalidInput as error:
            if "pip install" not in str(error):
                raise
        if isinstance(names.get("env"), Env | Mapping) and names.get("tasks"):
            make_taskset(names["env"], names["tasks"], "page", "a/model", names.get("rewards", ()))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TrainConfig]:
    monkeypatch.chdir(tmp_path)
    configs: list[TrainConfig] = []

    def check(config: TrainConfig, taskset: TaskSet, *others: object) -> TrainReport:
        configs.append(config)
        return TrainReport(tmp_path, config.steps, 0.0, Table({}, {}))

    monkeypatch.setattr(api, "start_run", check)
    return configs


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text("utf-8")], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs(page: Path, trained: list[TrainConfig]) -> None:
    if any(reading in page.read_text("utf-8") for reading in ("RunReader(", "load_run(")):
        write_run(Path("runs/demo"), steps=12)
    run(blocks(page))

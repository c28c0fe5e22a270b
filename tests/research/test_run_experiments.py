"""The comparison end to end, with real training runs cut short: done once, gone on with, failing in part."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.training.progress import SilentProgress
from research.paper.compare import CellsFailed, command_of, compare, comparison_json
from research.paper.config import PaperConfig
from research.paper.experiments import Result, Score, keep, kept, origin, plan
from research.paper.methods import NAIVE_RAG, Method
from research.paper.run_experiments import run_cells

SMALL = {"algorithm": "grpo", "groups_per_step": 2, "group_size": 2}
GRPO = Method("grpo", "GRPO", "train", SMALL)
BROKEN = Method("broken", "Broken", "train", {**SMALL, "model": "./none"})
CONFIG = PaperConfig(seeds=1, steps=1, n=4, jobs=2, out=Path("docs/results.md"))

INTERRUPTED = """
from pathlib import Path
from research.paper.compare import compare
from research.paper.config import PaperConfig
from research.paper.methods import NAIVE_RAG, Method
from agent_r1.training.progress import SilentProgress

grpo = Method("grpo", "GRPO", "train", {"algorithm": "grpo", "groups_per_step": 2, "group_size": 2})
compare(PaperConfig(seeds=1, steps=3, n=4), SilentProgress(), (NAIVE_RAG, grpo))
"""


class Said(SilentProgress):
    """Progress that is remembered."""

    def __init__(self):
        self.lines = []

    def print_line(self, text):
        self.lines.append(text)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_cells_run_once_and_one_that_fails_stops_no_other(here):
    methods = (NAIVE_RAG, BROKEN, GRPO)
    comparison = compare(CONFIG, SilentProgress(), methods)
    assert [result.method for result in comparison.outcomes.results] == ["naive-rag", "grpo"]
    (failure,) = comparison.outcomes.failures
    assert (failure.method, failure.seed) == ("broken", 0) and "./none" in failure.reason
    with pytest.raises(CellsFailed, match=r"1 of 3 cells failed: broken seed 0: .*none"):
        comparison.require_all()
    text = (here / "docs" / "results.md").read_text()
    assert "python -m research.paper --seeds 1 --steps 1 --n 4 --out docs/results.md\n" in text
    assert "- broken, seed 0: " in text and "| Broken (0 of 1 seeds) | - |" in text
    assert (here / "docs" / "learning_curves.svg").stat().st_size > 1000
    assert json.loads(json.dumps(comparison_json(comparison)))["written"] == [
        "docs/results.md",
        "docs/learning_curves.svg",
    ]
    grpo = comparison.outcomes.results[1]
    assert [step for step, _ in grpo.curve.reward] == [1] and [step for step, _ in grpo.curve.validation] == [1]
    assert (here / grpo.run / "run.db").is_file() and grpo.seconds > 0

    before, said = files(here / "runs"), Said()
    again = compare(CONFIG, said, (NAIVE_RAG, GRPO))
    again.require_all()
    assert said.lines == ["2 of 2 cells are done already"]
    assert files(here / "runs") == before, "nothing was run again"
    assert again.outcomes.results == comparison.outcomes.results


def test_killed_it_goes_on_and_touches_nothing_that_was_left(here):
    cell = plan(NAIVE_RAG, 0, 4, 3)
    done = here / "runs" / "paper" / f"{cell.name}.json"
    scores = dict.fromkeys(("style-a", "style-b", "three-hop"), Score(0.25, 4))
    keep(done, Result("naive-rag", 0, "agent-r1 eval", scores, origin()))
    finished = files(done.parent)
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], start_new_session=True) as running:
        while not list(here.glob("runs/paper/grpo-*/run.db")):
            assert running.poll() is None
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGKILL)
    (half,) = here.glob("runs/paper/grpo-*")
    assert list(here.glob("runs/paper/*.json")) == [done], "the cell that was running came to nothing"
    before = files(half)
    said = Said()
    comparison = compare(PaperConfig(seeds=1, steps=3, n=4), said, (NAIVE_RAG, GRPO))
    assert said.lines[0] == "1 of 2 cells are done already"
    assert comparison.outcomes.results[1].run == f"runs/paper/{half.name}-2"
    assert len(comparison.outcomes.results[1].curve.reward) == 3
    assert files(half) == before and finished.items() < files(done.parent).items()


def test_cancelled_it_ends_its_processes_and_keeps_no_half_result(here):
    cell = plan(GRPO, 0, 4, 300)

    run = here / "cells" / cell.name

    async def cancelled():
        running = asyncio.create_task(run_cells([cell], run.parent, 1, SilentProgress()))
        while not (run / "run.db-wal").exists():
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running], timeout=10)

    asyncio.run(cancelled())
    assert kept(run.with_name(f"{run.name}.json")) is None
    before = files(run)
    time.sleep(1.0)
    assert files(run) == before, "nobody writes any more"


def test_without_matplotlib_nothing_is_run(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidInput, match="pip install matplotlib"):
        compare(CONFIG, SilentProgress(), (NAIVE_RAG,))
    assert list(here.iterdir()) == []


def test_the_command_in_the_report_asks_for_the_same_again():
    assert command_of(PaperConfig(jobs=2)) == "python -m research.paper --seeds 3"
    assert command_of(PaperConfig(steps=5, n=20, seeds=2)) == "python -m research.paper --seeds 2 --steps 5 --n 20"

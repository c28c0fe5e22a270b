"""The comparison end to end, with short training runs: finished, continued, cancelled and partly failed."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.training.progress import SilentProgress
from research.paper.experiments import (
    NAIVE_RAG,
    Base,
    Method,
    PaperConfig,
    Result,
    Score,
    current_provenance,
    load_result,
    plan_experiment,
    save_result,
)
from research.paper.report import ExperimentsFailed, command_of, compare, comparison_json
from research.paper.run_experiments import run_experiments

ROOT = Path(__file__).parents[2]
TINY = Base(0, "tiny-base", hashlib.sha256((TINY_BASE_FOLDER / "model.safetensors").read_bytes()).hexdigest()[:8])
SMALL = {"algorithm": "grpo", "groups_per_step": 2, "group_size": 2}
GRPO = Method("grpo", "GRPO", SMALL)
BROKEN = Method("broken", "Broken", {**SMALL, "model": "./none"})
CONFIG = PaperConfig(seeds=1, bases=1, steps=1, n=4, jobs=2, out=Path("report.md"))

INTERRUPTED = """
from pathlib import Path
from research.paper.report import compare
from research.paper.experiments import PaperConfig
from research.paper.experiments import NAIVE_RAG, Method
from agent_r1.training.progress import SilentProgress

grpo = Method("grpo", "GRPO", {"algorithm": "grpo", "groups_per_step": 2, "group_size": 2})
compare(PaperConfig(seeds=1, bases=1, steps=2, n=4), SilentProgress(), (NAIVE_RAG, grpo))
"""


class RecordingProgress(SilentProgress):
    """Progress that records its lines."""

    def __init__(self):
        self.lines = []

    def print_line(self, text):
        self.lines.append(text)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder):
    """Return the time of the last change of each file, except of the report and its pictures, which are made anew."""
    changed = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    return {path: time for path, time in changed.items() if path.suffix not in (".md", ".svg")}


def test_a_failure_does_not_stop_the_other_experiments(here):
    comparison = compare(CONFIG, SilentProgress(), (BROKEN, NAIVE_RAG))
    assert [result.method for result in comparison.outcomes.results] == ["naive-rag"]
    (failure,) = comparison.outcomes.failures
    assert (failure.method, failure.base, failure.seed) == ("broken", 0, 0) and "./none" in failure.reason
    with pytest.raises(ExperimentsFailed, match=r"1 of 2 experiments failed: broken base 0 seed 0: .*none"):
        comparison.raise_failures()
    text = (here / "report.md").read_text("utf-8")
    assert "python -m research.paper --seeds 1 --bases 1 --steps 1 --n 4 --out report.md\n" in text
    assert "- Failed: broken base 0 seed 0: " in text and "There are no runs of: Broken." in text
    assert (here / "learning_curves.svg").stat().st_size > 1000
    assert json.loads(json.dumps(comparison_json(comparison)))["written"] == [
        "report.md",
        "learning_curves.svg",
    ]


def test_a_killed_comparison_continues_and_runs_no_experiment_twice(here):
    experiment = plan_experiment(NAIVE_RAG, TINY, 0, 4, 2)
    done = here / "runs" / "paper" / f"{experiment.name}.json"
    scores = dict.fromkeys(("style-a", "style-b", "three-hop"), Score(0.25, 0.2, 4))
    save_result(done, Result("naive-rag", 0, 0, ("agent-r1 eval",), scores, current_provenance()))
    finished = files(done.parent)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], env=environment, start_new_session=True) as running:
        while not list(here.glob("runs/paper/grpo-*/run.db")):
            assert running.poll() is None
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGKILL)
    (interrupted,) = here.glob("runs/paper/grpo-*")
    assert list(here.glob("runs/paper/*.json")) == [done], "the interrupted experiment has no result"
    before = files(interrupted)
    progress, config = RecordingProgress(), PaperConfig(seeds=1, bases=1, steps=2, n=4)
    comparison = compare(config, progress, (NAIVE_RAG, GRPO))
    assert progress.lines[0] == "1 of 2 experiments are done already"
    grpo = comparison.outcomes.results[1]
    assert grpo.training.run == f"runs/paper/{interrupted.name}-2"
    assert grpo.training.curve.attempts == (4, 8) and grpo.training.explained_variance is None
    assert all(0 <= score.sampled <= 1 and score.n == 4 for score in grpo.scores.values())
    assert (here / grpo.training.run / "run.db").is_file()
    assert files(interrupted) == before and finished.items() < files(done.parent).items()

    before, progress = files(here / "runs"), RecordingProgress()
    again = compare(config, progress, (NAIVE_RAG, GRPO))
    again.raise_failures()
    assert progress.lines == ["2 of 2 experiments are done already"]
    assert files(here / "runs") == before, "no experiment ran again"
    assert again.outcomes.results == comparison.outcomes.results


def test_a_report_of_what_is_finished_runs_nothing(here):
    compare(CONFIG, SilentProgress(), (NAIVE_RAG,))
    finished = compare(CONFIG.model_copy(update={"finished": True}), SilentProgress(), (NAIVE_RAG, GRPO))
    assert [result.method for result in finished.outcomes.results] == ["naive-rag"]
    assert not list(here.glob("runs/paper/grpo*"))
    assert "1 of 2 runs were made" in (here / "report.md").read_text("utf-8")


def test_cancelling_ends_the_processes_and_keeps_no_partial_result(here):
    experiment = plan_experiment(GRPO, TINY, 0, 4, 300)

    run = here / "experiments" / experiment.name

    async def cancelled():
        running = asyncio.create_task(run_experiments([experiment], run.parent, 1, SilentProgress()))
        while not (run / "run.db-wal").exists():
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running], timeout=600)

    asyncio.run(cancelled())
    assert load_result(run.with_name(f"{run.name}.json")) is None
    before = files(run)
    time.sleep(1.0)
    assert files(run) == before, "no process writes any more"


def test_the_command_in_the_report_reproduces_it():
    assert command_of(PaperConfig(jobs=2, finished=True)) == "python -m research.paper --seeds 3 --bases 3"
    small = command_of(PaperConfig(steps=5, n=20, seeds=2))
    assert small == "python -m research.paper --seeds 2 --bases 3 --steps 5 --n 20"

"""`agent-r1 show` says what a run is and what an attempt did, takes names of attempts, and no text of a trajectory
controls the terminal."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sqlite3
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import record_all
from shown_runs import CONFIG, HOSTILE, attempt_id, make_trajectory, step_events, write_run

from agent_r1.cli import main
from agent_r1.core.events import (
    AttemptFinished,
    AttemptStarted,
    Event,
    LogEvent,
    PolicyPublished,
)
from agent_r1.core.inference import PolicyVersion
from agent_r1.core.messages import Message
from agent_r1.store.folder import create_run
from agent_r1.store.reader import RunReader, file_events, result_event
from agent_r1.viewer.report import Prediction, make_critic_report


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("show") / "runs"
    hardware = {"processor": "EPYC", "cores": 16, "gpus": ["H200"], "torch": "2.13.0"}
    write_run(runs / "demo", result_event("hardware", hardware), LogEvent("completed", "3 steps in 1.0 s"))
    create_run(runs / "empty", CONFIG).close()
    write_run(runs / "hostile", LogEvent("stopped", f"OSError: {HOSTILE}"), steps=1, text=HOSTILE)
    return runs


@dataclass(frozen=True)
class Shown:
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The output with single spaces, as if no line had been wrapped."""
        return " ".join(self.out.split())

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1], parse_constant=pytest.fail)
        return found


Show = Callable[..., Shown]


@pytest.fixture
def show(written: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Show:
    monkeypatch.chdir(written.parent)

    def call(*arguments: str, width: int = 120) -> Shown:
        monkeypatch.setenv("COLUMNS", str(width))
        capfd.readouterr()
        code = main(["show", *arguments])
        return Shown(code, *capfd.readouterr())

    return call


def test_a_run_is_summarized(show: Show) -> None:
    shown = show("demo")
    assert (shown.code, shown.err) == (0, "")
    for part in (
        "demo complete step 3 of 3",
        "task set films",
        "algorithm grpo",
        "machine EPYC, 16 cores, H200, torch 2.13.0",
        "attempts 36: 33 trained, 3 dropped",
        "endings 33 completed, 3 engine failed",
        "validation EM 0.750 (0.10-0.90) at step 3, the best",
        "warnings 3",
        "Values of states calibration error 0.8",
        "states before states mean value mean reward after explained variance all turns 6 0.3 -0.5",
        "completed 3 steps in 1.0 s",
        "agent-r1 show demo worst",
    ):
        assert part in shown.words


@pytest.mark.parametrize(
    ("ending", "state", "resumes"),
    [
        ([LogEvent("stopped", "SIGINT")], "stopped", True),
        ([LogEvent("stopped", "RunStopped: too many failed")], "failed", True),
        ([], "stopped", True),
        ([LogEvent("completed", "3 steps")], "complete", False),
    ],
)
def test_the_state_says_how_the_run_ended(
    ending: list[Event], state: str, resumes: bool, tmp_path: Path, show: Show
) -> None:
    write_run(tmp_path / "run", *ending)
    shown = show(str(tmp_path / "run"))
    assert f"run {state} step 3 of 3" in shown.words
    assert (f"agent_r1.train(env, tasks, run='{tmp_path}/run', resume=True)" in shown.words) == resumes


@pytest.mark.parametrize(("file", "argument"), [("my agents/a.py", "'my agents/a.py'"), ("/x/a.py", "/x/a.py")])
def test_the_command_that_continues_a_run_names_the_file_of_the_run(
    file: str, argument: str, tmp_path: Path, show: Show
) -> None:
    write_run(tmp_path / "run", *file_events(Path("old.py")), *file_events(Path(file)), LogEvent("stopped", "SIGINT"))
    shown = show(str(tmp_path / "run"))
    assert f"agent-r1 train {argument} --run {tmp_path}/run --resume" in shown.words
    assert f"task set films ({os.path.abspath(file)})" in shown.words


def test_a_run_that_is_being_written_is_shown(tmp_path: Path, show: Show) -> None:
    with closing(create_run(tmp_path / "run", CONFIG)) as writer:
        empty = show(str(tmp_path / "run")).words
        assert "step 0 of 3" in empty and "attempts none yet" in empty and "worst" not in empty
        record_all(writer, [PolicyPublished(PolicyVersion(0, 0, "begin"))], step_events(1, "Bruno"))
        started = AttemptStarted(attempt_id(2, 0), "train", 1)
        record_all(writer, [started])
        shown, attempt = show(str(tmp_path / "run")), show(str(tmp_path / "run"), "20.0")
    assert "training step 1 of 3" in shown.words and "1 pending" in shown.words
    assert "in progress" in attempt.words and "no update has used it yet" in attempt.words


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("demo:20.3.0:style-a/2", "20.3.0"),
        ("20.3", "20.3.0"),
        ("20.1", "20.1.0"),  # and not 20.10 or 20.11
        ("best", "30.10.0"),
        ("worst", "30.0.0"),
        ("failed", "30.11.0"),
    ],
)
def test_an_attempt_is_named_by_its_id_its_beginning_or_a_word(show: Show, name: str, found: str) -> None:
    assert show("demo", name, "--json").data["attempt"].split(":")[1] == found


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nothing"], "run: got nothing, but there is no folder runs/nothing; "),
        (["demo", "99.1"], "attempt: got '99.1', which is no attempt of runs/demo; give an id"),
        (["demo", "20."], "which several ids begin with: 20.0.0:style-a/2, 20.1.0:style-a/2"),
        (["demo", "--tokens"], "name one: 'agent-r1 show RUN ATTEMPT --tokens'"),
        (["demo\0"], "run: got"),
    ],
)
def test_bad_names_are_one_line(show: Show, arguments: list[str], line: str) -> None:
    shown = show(*arguments)
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert line in shown.err


def test_a_run_of_another_schema_is_one_line(written: Path, show: Show, tmp_path: Path) -> None:
    shutil.copytree(written / "demo", tmp_path / "old")
    with closing(sqlite3.connect(tmp_path / "old/run.db")) as connection, connection:
        connection.execute("UPDATE meta SET value = 5 WHERE key = 'schema'")
    shown = show(str(tmp_path / "old"))
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1) and "which is older" in shown.err


def test_a_damaged_attempt_is_one_line(written: Path, show: Show, tmp_path: Path) -> None:
    shutil.copytree(written / "demo", tmp_path / "damaged")
    with closing(sqlite3.connect(tmp_path / "damaged/run.db")) as connection, connection:
        connection.execute("UPDATE turns SET content = x'00'")
    shown = show(str(tmp_path / "damaged"), "20.3")
    assert (shown.code, shown.out, shown.err.count("\n")) == (1, "", 1)
    assert f"a record of {tmp_path}/damaged is damaged: " in shown.err and "agent-r1 verify" in shown.err


def test_a_conversation_has_calls_with_results_rewards_and_the_group(show: Show) -> None:
    words = show("demo", "20.0").words
    for part in (
        "demo:20.0.0:style-a/2 completed reward -0.5",
        "trained at step 2, advantages add up to -5",
        "2 turns, 4 tokens, 1 call (1 with an error)",
        "after 2.5 s of waiting; engine 0.5 s, environment 0.8 s",
        "time engine 0.5 s (first token 0.2 s), environment 0.8 s",
        "rewards em 0",
        "user Who rules Bruno?",
        "turn 0 · 2 tokens after 3 · stop",
        "policy I look up Bruno",
        "call search(query='Bruno') 0.25 s",
        "error timed out: Bruno",
        "result Alba : capital Bruno .",
        "reward found 0",
        "user go on Bruno",
        "turn 1 · 2 tokens after 6 · stop",
        "reward format -0.5",
        "group 20 · 12 attempts, mean reward 9.5",
        "> 20.0.0 -0.5 -5 2 4 1 completed",
        "20.11.0 \N{EN DASH} \N{EN DASH} 0 0 engine failed",
    ):
        assert part in words


def test_tokens_have_the_numbers_of_engine_and_trainer(show: Show) -> None:
    lines = [line.split() for line in show("demo", "10.0", "--tokens", width=140).out.splitlines()]
    header = ["token", "id", "loss", "engine", "trainer", "gap", "advantage", "weight", "entropy", "value"]
    assert header in lines
    first = ["0", "⟨9⟩", "9", "1", "-0.5000", "-0.5000", "0.0000", "0.7500", "0.5000", "1.2500", "0.3000"]
    second = ["1", "⟨2⟩", "2", "0", "-0.2500", "-", "-", "-0.1250", "0.0000", "2.5000", "0.4000"]
    assert first in lines and second in lines
    narrow = show("demo", "10.0", "--tokens", width=80).out
    assert "advantage" in narrow and "gap" in narrow and "entropy" not in narrow


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path, show: Show) -> None:
    trajectory = replace(make_trajectory(1, 3), rewards={"em": math.nan})
    with closing(create_run(tmp_path / "run", CONFIG)) as writer:
        record_all(writer, [AttemptStarted(trajectory.attempt, "train", 0), AttemptFinished(trajectory)])
    data = show(str(tmp_path / "run"), "10.3", "--json").data
    assert data["rewards"] == {"em": None} and data["reward"] is None


def test_the_json_of_an_attempt_has_all_texts_and_numbers(show: Show) -> None:
    data = show("demo", "10.0", "--tokens", "--json").data
    assert (data["status"], data["fate"], data["reward"], data["rewards"]) == (
        "completed",
        "trained",
        -0.5,
        {"em": 0.0},
    )
    assert (data["start_time"], data["wait_seconds"]) == (1_767_323_045.0, 2.5)
    timing = {"start_seconds": 0.0, "end_seconds": 0.5, "first_token_seconds": 0.25, "env_seconds": 0.75}
    assert data["turns"][0]["timing"] == timing
    assert data["turns"][1]["timing"] is None
    [call] = data["turns"][0]["calls"]
    assert (call["name"], call["arguments"], call["error"]) == ("search", {"query": "Bruno"}, "timed out: Bruno")
    [first, second] = data["turns"][0]["tokens"]
    assert (first["id"], first["weight"], first["trainer"], first["gap"]) == (9, 0.5, -0.5, 0.0)
    assert (second["weight"], second["trainer"], second["advantage"]) == (0.0, None, -0.125)
    assert [turn["value"] for turn in data["turns"]] == [0.3, 0.3]
    assert len(data["siblings"]) == 12


def test_the_json_of_a_run_has_its_curves_and_counts(show: Show) -> None:
    data = show("demo", "--json").data
    assert (data["state"], data["step"], data["fates"]) == ("complete", 3, {"trained": 33, "dropped": 3})
    assert data["curves"]["entropy"] == {"1": 1.0, "2": None, "3": 1 / 3}
    assert data["validation"]["best"] == {"step": 3, "em": 0.75, "low": 0.1, "high": 0.9}


VIEWS = [
    [],
    ["10.0"],
    ["10.0", "--tokens"],
    ["failed"],
    ["10.0", "--json"],
    ["--json"],
]


def controls(text: str) -> Iterator[str]:
    """Yield the characters of a text that can control a terminal, or that change the direction of the text."""
    return (char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs") and char != "\n")


@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
def test_hostile_texts_do_not_control_the_terminal(show: Show, view: list[str]) -> None:
    shown = show("hostile", *view)
    assert shown.code == 0 and list(controls(shown.out)) == []


def test_hostile_texts_stay_readable(show: Show) -> None:
    words = show("hostile", "10.0").words
    assert (
        "⟨U+001B⟩[2J⟨U+001B⟩]0;owned⟨U+0007⟩⟨U+009B⟩31m⟨U+202E⟩gnp⟨U+200B⟩" in words and "[bold]markup[/bold]" in words
    )


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("view", [view for view in VIEWS if "--json" not in view], ids=" ".join)
def test_lines_fit_the_terminal(show: Show, view: list[str], width: int) -> None:
    shown = show("demo", *view, width=width)
    assert shown.code == 0 and max(map(len, shown.out.splitlines())) <= width


def test_an_attempt_whose_reward_raised_has_failed(tmp_path: Path, show: Show) -> None:
    scored, unscored, last = (make_trajectory(1, index) for index in (1, 2, 3))
    unscored = replace(unscored, rewards={"em": None}, reason="reward em could not be scored: KeyError: 'gold'")
    with closing(create_run(tmp_path / "demo", {})) as writer:
        for one in (scored, unscored, last):
            record_all(writer, [AttemptStarted(one.attempt, "train", 0), AttemptFinished(one)])
    assert show(str(tmp_path / "demo"), "failed", "--json").data["attempt"] == str(unscored.attempt)


def test_a_rewritten_context_and_the_answer_of_an_agent_are_shown(tmp_path: Path, show: Show) -> None:
    trajectory = replace(make_trajectory(1, 3), answer="the answer 42")
    saw = (Message.user("Take the neighbor."), Message.assistant("", trajectory.turns[0].action.message.calls))
    turns = (trajectory.turns[0], replace(trajectory.turns[1], parent=None, new_messages=saw))
    with closing(create_run(tmp_path / "run", CONFIG)) as writer:
        record_all(writer, [AttemptStarted(trajectory.attempt, "train", 0)])
        record_all(writer, [AttemptFinished(replace(trajectory, turns=turns))])
    words = show(str(tmp_path / "run"), "10.3").words
    assert "answer the answer 42" in words
    state = r'user Take the neighbor\. .*search \{ "query": "Bruno" \}'
    assert re.search(rf"turn 1 .* a new branch .* {state} policy", words)
    data = show(str(tmp_path / "run"), "10.3", "--json").data
    assert data["answer"] == "the answer 42"
    assert [len(turn["state"]) for turn in data["turns"]] == [0, 2]


def test_a_perfect_critic_explains_all_variance_and_a_constant_one_none() -> None:
    rewards = [0.0, 1.0, 1.0, 0.0, 1.0]
    perfect = make_critic_report([Prediction(0, reward, reward) for reward in rewards])
    constant = make_critic_report([Prediction(0, 0.6, reward) for reward in rewards])
    assert (perfect.rows[0].explained, perfect.calibration_error) == (1.0, 0.0)
    assert constant.rows[0].explained == pytest.approx(0.0)
    # Each of five bins has one prediction: |0.6 - 0| twice and |0.6 - 1| three times.
    assert constant.calibration_error == pytest.approx((2 * 0.6 + 3 * 0.4) / 5)
    assert math.isnan(make_critic_report([Prediction(0, 0.5, 1.0)] * 3).rows[0].explained)
    turns = make_critic_report([Prediction(turn, 0.5, 1.0) for turn in (0, 2, 0)])
    assert [(row.name, row.count) for row in turns.rows] == [("all turns", 3), ("turn 0", 2), ("turn 2", 1)]


def test_the_attempts_at_each_task_are_counted(show: Show, written: Path) -> None:
    found = show("demo", "--tasks", "--json").data["tasks"]
    with closing(RunReader(written / "demo")) as reader:
        attempts = reader.list_attempts(limit=-1)
    assert sorted(one["task"] for one in found) == [f"style-a/{step}" for step in (1, 2, 3)]
    for one in found:
        own = [attempt for attempt in attempts if attempt.attempt.task == one["task"]]
        rewards = [attempt.reward for attempt in own if attempt.reward is not None]
        assert (one["split"], one["attempts"], one["failed"]) == ("train", 12, 1)
        assert one["reward"] == pytest.approx(sum(rewards) / 11) and one["last"] == rewards[-1] != rewards[0]
        assert one["above_zero"] == pytest.approx(sum(reward > 0 for reward in rewards) / 11) and rewards[0] < 0
    assert "task split attempts failed mean reward above 0 last reward style-a/1" in show("demo", "--tasks").words
    assert show("hostile", "--tasks").code == 0 and show("empty", "--tasks", "--json").data["tasks"] == []
    assert show("demo", "best", "--tasks").err.endswith("tasks: got it and the attempt best; leave one out\n")

"""What a person and a program are told of a run."""

import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.training.metrics import EvalResult, reward_means
from agent_r1.training.progress import ProgressBar, StepReport, format_step
from agent_r1.training.tables import (
    Cell,
    PassAtK,
    SampledCell,
    Table,
    TrainReport,
    make_cell,
    render_report,
    report_json,
    table_json,
    wilson_interval,
)

CELL = Cell(0.9, 0.93, 200, 0.85, 0.934)
TABLE = Table(
    {"naive-rag": {"style-a": CELL}, "trained": {"style-a": CELL, "three-hop": CELL}}, {"style-a": {"k": 0.5}}
)
SAMPLED = SampledCell(0.25, 0.2, 0.3, any=0.75, majority=0.5, likeliest=0.4)
REPORT = TrainReport(Path("runs/demo"), 12, 3.5, TABLE, PassAtK(16, 32, {"style-a": SAMPLED}))


def test_a_cell_is_the_mean_of_its_answers_with_an_interval() -> None:
    cell = make_cell([EvalResult(1.0, 1.0)] * 180 + [EvalResult(0.0, 0.3)] * 20)
    assert cell is not None
    assert (cell.em, cell.f1, cell.n) == (0.9, pytest.approx(0.93), 200)
    # The interval is where a score test at the 97.5 % quantile neither accepts nor rejects.
    for bound in (cell.low, cell.high):
        assert abs(cell.em - bound) / math.sqrt(bound * (1 - bound) / 200) == pytest.approx(1.95996, abs=1e-4)


def test_sub_match_is_told_apart_from_exact_match_where_there_is_one() -> None:
    cell = make_cell([EvalResult(1.0, 1.0, 1.0), EvalResult(0.0, 0.5, 1.0), *[EvalResult(0.0, 0.0, 0.0)] * 2])
    assert cell is not None
    assert (cell.em, cell.f1, cell.sub) == (0.25, 0.375, 0.5)
    table = Table({"trained": {"hotpotqa": cell}}, {})
    assert table_json(table)["table"]["trained"]["hotpotqa"]["sub"] == 0.5
    out = io.StringIO()
    Console(file=out, width=80).print(render_report(TrainReport(Path("r"), 1, 1.0, table)))
    assert "F1 0.38, sub 0.50" in out.getvalue() and "F1, sub-match;" in out.getvalue()
    without = Table({"trained": {"hotpotqa": make_cell([EvalResult(1.0, 1.0)])}}, {})
    assert "sub" not in table_json(without)["table"]["trained"]["hotpotqa"]


def test_failed_attempts_are_no_wrong_answers() -> None:
    right, failed = EvalResult(1.0, 1.0), EvalResult(0.0, 0.0, failure="no browser")
    cell = make_cell([right, failed, EvalResult(0.0, 0.0), failed])
    assert cell is not None and (cell.em, cell.f1, cell.n, cell.failed) == (0.5, 0.5, 2, 2)
    assert make_cell([failed] * 3) is None
    table = Table({"trained": {"hotpotqa": cell, "musique": None}}, {})
    shown = table_json(table)["table"]["trained"]
    assert shown["hotpotqa"]["failed"] == 2 and shown["musique"] is None
    out = io.StringIO()
    Console(file=out, width=80).print(render_report(TrainReport(Path("r"), 1, 1.0, table)))
    assert "without 2 failed" in out.getvalue() and "all failed" in out.getvalue()
    assert " ".join(out.getvalue().split()).count("questions: 4") == 1


@given(st.integers(1, 2000), st.data())
def test_the_interval_holds_the_share_and_stays_within_zero_and_one(n: int, data: st.DataObject) -> None:
    share = data.draw(st.integers(0, n)) / n
    low, high = wilson_interval(share, n)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1 and low < high


def test_the_json_has_the_documented_shape() -> None:
    data = json.loads(json.dumps(report_json(REPORT)))
    assert data["table"]["trained"]["three-hop"] == {"em": 0.9, "f1": 0.93, "n": 200, "low": 0.85, "high": 0.934}
    assert data["retrieval"] == {"style-a": {"k": 0.5}}
    assert (data["run"], data["train_seconds"], data["steps"]) == ("runs/demo", 3.5, 12)
    cell = {"one": 0.25, "low": 0.2, "high": 0.3, "any": 0.75, "majority": 0.5, "likeliest": 0.4}
    assert data["pass_at_k"] == {"k": 16, "attempts": 32, "cells": {"style-a": cell}}
    assert set(table_json(TABLE)) == {"measure", "table", "retrieval"}


def test_the_table_fits_a_terminal_and_shows_every_cell() -> None:
    splits = ("style-a", "style-b", "three-hop")
    cells = {method: dict.fromkeys(splits, CELL) for method in ("naive-rag", "base-tool-call", "trained")}
    out = io.StringIO()
    Console(file=out, width=80).print(render_report(TrainReport(Path("r"), 1, 1.0, Table(cells, {}))))
    assert out.getvalue().count("0.90 (0.85-0.93)") == 9 and "..." not in out.getvalue()
    assert all(name in out.getvalue() for name in (*cells, *splits, "questions: 200"))


@pytest.mark.parametrize("count", [4, 6, 8])
def test_a_terminal_that_is_too_narrow_cuts_no_name_and_no_number(count: int) -> None:
    splits = [f"{name}/three-hop" for name in ("wiki", "notes", "held", "people", "a", "b", "c", "d")][:count]
    cells = {method: dict.fromkeys(splits, CELL) for method in ("naive-rag", "base-tool-call", "trained")}
    out = io.StringIO()
    Console(file=out, width=80).print(render_report(TrainReport(Path("r"), 1, 1.0, Table(cells, {}))))
    lines = out.getvalue().splitlines()
    assert "…" not in out.getvalue() and max(map(len, lines)) <= 80
    rule = next(number for number, line in enumerate(lines) if "──" in line)
    heads = [line.split() for line in lines[:rule] if line.strip()]
    assert count > 4 or heads == [[name.replace("three-hop", "") for name in splits], ["method", *["three-hop"] * 4]]
    assert "".join(map("".join, heads)).count("/") == count


def test_names_are_not_taken_for_markup() -> None:
    table = Table({"[bold]": {"[/red]": CELL}}, {"[/red]": {"[x]": 1.0}})
    out = io.StringIO()
    Console(file=out, width=80).print(render_report(TrainReport(Path("[/r]"), 1, 1.0, table)))
    assert all(name in out.getvalue() for name in ("[bold]", "[/red]", "[x]", "[/r]"))


def test_a_step_is_a_line_with_the_time_left() -> None:
    line = format_step(StepReport(3, 0.5, 0.25, 1234.5), steps=12, elapsed=30.0)
    assert line == "step 3/12  reward 0.500  EM 0.250  1234 tokens/s  1 m 30 s left"
    assert "EM" not in format_step(StepReport(3, 0.5, None, 1.0), 12, 1.0)


def terminal() -> tuple[ProgressBar, io.StringIO]:
    out = io.StringIO()
    return ProgressBar(Console(file=out, force_terminal=True, width=120)), out


def test_a_terminal_keeps_a_line_of_each_step_with_all_rewards_and_the_validation() -> None:
    progress, out = terminal()
    progress.start(3)
    for step in (1, 2):
        metrics = {"reward/em": 0.25, "reward/found": 0.8, "validation_em": 0.61, "kl": 3.0}
        progress.on_step(StepReport(step, 0.5, 0.25, 10.0, metrics))
    progress.finish()
    kept = [line for line in out.getvalue().splitlines() if "reward 0.500" in line]
    shown = "  reward 0.500  EM 0.250  found 0.800  validation 0.610  10 tokens/s"
    assert [line[line.index("step ") :].partition("  0 s left")[0] for line in kept] == [
        f"step {step}/3{shown}" for step in (1, 2)
    ]


def test_the_mean_of_each_reward_counts_a_call_that_was_never_made_as_zero() -> None:
    def scored(**rewards: float | None) -> Trajectory:
        return Trajectory(AttemptId("run", "t", 0, 0), "t", (), Status.COMPLETED, rewards=rewards)

    trajectories = [scored(em=1.0, found=0.5), scored(em=0.0), scored(em=None, bad=None), scored()]
    assert reward_means([trajectories]) == {"reward/em": 0.5, "reward/found": 0.5 / 3}

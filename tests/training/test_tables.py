"""What a person and a program are told of a run."""

import io
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent_r1.training.progress import ProgressBar, StepReport, format_step, make_progress
from agent_r1.training.tables import (
    Cell,
    PassAtK,
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
REPORT = TrainReport(Path("runs/demo"), 12, 3.5, TABLE, PassAtK(16, {"style-a": 0.75}, 32, {"style-a": 0.25}))


@dataclass(frozen=True)
class Scores:
    em: float
    f1: float
    sub: float | None = None


def test_a_cell_is_the_mean_of_its_answers_with_an_interval() -> None:
    cell = make_cell([Scores(1.0, 1.0)] * 180 + [Scores(0.0, 0.3)] * 20)
    assert (cell.em, cell.f1, cell.n) == (0.9, pytest.approx(0.93), 200)
    # The interval is where a score test at the 97.5 % quantile neither accepts nor rejects.
    for bound in (cell.low, cell.high):
        assert abs(cell.em - bound) / math.sqrt(bound * (1 - bound) / 200) == pytest.approx(1.95996, abs=1e-4)


def test_the_seconds_of_a_run_that_was_resumed_are_those_since() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(render_report(replace(REPORT, resumed_from=5)))
    assert "12 steps, those after step 5 in 3.5 s, all in runs/demo" in out.getvalue()


def test_sub_match_is_told_apart_from_exact_match_where_there_is_one() -> None:
    cell = make_cell([Scores(1.0, 1.0, 1.0), Scores(0.0, 0.5, 1.0), Scores(0.0, 0.0), Scores(0.0, 0.0, 0.0)])
    assert (cell.em, cell.f1, cell.sub) == (0.25, 0.375, 0.5)
    table = Table({"trained": {"hotpotqa": cell}}, {})
    assert table_json(table)["table"]["trained"]["hotpotqa"]["sub"] == 0.5
    out = io.StringIO()
    Console(file=out, width=80).print(render_report(TrainReport(Path("r"), 1, 1.0, table)))
    assert "F1 0.38, sub 0.50" in out.getvalue() and "F1, sub-match;" in out.getvalue()
    without = Table({"trained": {"hotpotqa": make_cell([Scores(1.0, 1.0)])}}, {})
    assert "sub" not in table_json(without)["table"]["trained"]["hotpotqa"]


def test_a_cell_without_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        make_cell([])


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
    assert data["pass_at_k"] == {"k": 16, "shares": {"style-a": 0.75}, "attempts": 32, "ones": {"style-a": 0.25}}
    assert set(table_json(TABLE)) == {"table", "retrieval"}


def test_the_table_fits_a_terminal_and_shows_every_cell() -> None:
    splits = ("style-a", "style-b", "three-hop")
    cells = {method: dict.fromkeys(splits, CELL) for method in ("naive-rag", "base-tool-call", "trained")}
    out = io.StringIO()
    Console(file=out, width=80).print(render_report(TrainReport(Path("r"), 1, 1.0, Table(cells, {}))))
    assert out.getvalue().count("0.90 (0.85-0.93)") == 9 and "..." not in out.getvalue()
    assert all(name in out.getvalue() for name in (*cells, *splits, "questions: 200"))


def test_names_are_not_taken_for_markup() -> None:
    table = Table({"[bold]": {"[/red]": CELL}}, {"[/red]": {"[x]": 1.0}})
    out = io.StringIO()
    Console(file=out, width=80).print(render_report(TrainReport(Path("[/r]"), 1, 1.0, table)))
    assert all(name in out.getvalue() for name in ("[bold]", "[/red]", "[x]", "[/r]"))


def test_a_step_is_a_line_with_the_time_left() -> None:
    line = format_step(StepReport(3, 0.5, 0.25, 1234.5), steps=12, elapsed=30.0)
    assert line == "step 3/12  reward 0.500  EM 0.250  1234 tokens/s  1:30 left"
    assert "EM" not in format_step(StepReport(3, 0.5, None, 1.0), 12, 1.0)


def test_the_time_left_is_told_from_the_steps_since_the_run_was_resumed() -> None:
    assert format_step(StepReport(8, 0.5, 0.25, 1.0), steps=12, elapsed=30.0, taken=6).endswith("  1:00 left")


def test_without_a_terminal_progress_is_a_line_per_step() -> None:
    out = io.StringIO()
    progress = make_progress(Console(file=out))
    progress.start(2)
    progress.on_step(StepReport(1, 0.5, 0.5, 10.0))
    progress.print_line("evaluating [trained] " + "x" * 200)
    progress.on_step(StepReport(2, 1.0, 1.0, 10.0))
    progress.finish()
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "evaluating [trained] " + "x" * 200, "step 2/2"]


def test_on_a_terminal_progress_is_a_bar() -> None:
    out = io.StringIO()
    progress = make_progress(Console(file=out, force_terminal=True, width=100))
    assert isinstance(progress, ProgressBar)
    progress.print_line("loading")
    progress.start(2)
    progress.on_step(StepReport(2, 1.0, 0.75, 10.0))
    progress.finish()
    progress.finish()
    assert "loading" in out.getvalue() and "step 2/2  reward 1.000  EM 0.750" in out.getvalue()

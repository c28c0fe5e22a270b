"""`agent-r1 show RUN --critic`: explained variance by turn and calibration, from recorded values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from shown_runs import write_run

from agent_r1.cli import main
from agent_r1.commands.show_attempt import Prediction, make_report
from agent_r1.core.events import LogEvent


def test_a_perfect_critic_explains_all_variance_and_a_constant_one_none() -> None:
    rewards = [0.0, 1.0, 1.0, 0.0, 1.0]
    perfect = make_report([Prediction(0, reward, reward) for reward in rewards])
    constant = make_report([Prediction(0, 0.6, reward) for reward in rewards])
    assert (perfect.rows[0].explained, perfect.calibration_error) == (1.0, 0.0)
    assert constant.rows[0].explained == pytest.approx(0.0)
    assert math.isnan(make_report([Prediction(0, 0.5, 1.0)] * 3).rows[0].explained)


def test_turns_have_rows_of_their_own_and_bins_hold_every_state_once() -> None:
    predictions = [Prediction(turn, index / 10, float(index > 5)) for index in range(11) for turn in (0, 2)]
    report = make_report(predictions)
    assert [(row.name, row.count) for row in report.rows] == [("all turns", 22), ("turn 0", 11), ("turn 2", 11)]
    assert sum(row.count for row in report.bins) == 22 and len(report.bins) == 5
    assert report.bins[0].reward == 0.0 and report.bins[-1].reward == 1.0


def test_values_of_a_run_are_compared_with_the_rewards_that_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "demo", LogEvent("completed", "3 steps in 1.0 s"))
    assert main(["show", "demo", "--critic", "--json"]) == 0
    states = json.loads(capsys.readouterr().out)["states"]
    assert [row["name"] for row in states] == ["all turns", "turn 0", "turn 1"] and states[0]["value"] == 0.3
    assert main(["show", "demo", "--critic"]) == 0
    assert "mean reward after" in capsys.readouterr().out
    assert main(["show", "demo", "--critic", "--metric", "em"]) == 2
    assert main(["show", "demo", "--critic", "--step", "2"]) == 2
    capsys.readouterr()
    assert main(["show", "demo", "10.0"]) == 0
    assert "turn 1 · 2 tokens after 6 · stop · value 0.3" in " ".join(capsys.readouterr().out.split())
    assert main(["show", "demo", "10.0", "--json"]) == 0
    assert [turn["value"] for turn in json.loads(capsys.readouterr().out)["turns"]] == [0.3, 0.3]

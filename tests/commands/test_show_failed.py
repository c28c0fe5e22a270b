"""``agent-r1 show RUN failed`` finds attempts whose reward could not be computed."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from shown_runs import make_trajectory

from agent_r1.cli import main
from agent_r1.core.events import AttemptFinished, AttemptStarted
from agent_r1.store.folder import create_run


def test_an_attempt_whose_reward_raised_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scored, unscored, last = (make_trajectory(1, index) for index in (1, 2, 3))
    unscored = replace(unscored, rewards={"em": None}, reason="reward em could not be scored: KeyError: 'gold'")
    with closing(create_run(tmp_path / "demo", {})) as writer:
        for trajectory in (scored, unscored, last):
            events = [AttemptStarted(trajectory.attempt, "train", 0), AttemptFinished(trajectory)]
            asyncio.run(writer.record(*events))
    assert main(["show", str(tmp_path / "demo"), "failed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["attempt"] == str(unscored.attempt)

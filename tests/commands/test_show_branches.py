"""`agent-r1 show` of an attempt with several conversations, and with an answer that an agent program returned."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import record_all
from shown_runs import CONFIG, make_trajectory

from agent_r1.cli import main
from agent_r1.core.events import AttemptFinished, AttemptStarted
from agent_r1.core.messages import Message
from agent_r1.store.folder import create_run


def test_a_rewritten_context_and_the_answer_of_an_agent_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trajectory = replace(make_trajectory(1, 3), answer="the answer 42")
    saw = (Message.user("Take the neighbor."), Message.assistant("", trajectory.turns[0].action.message.calls))
    turns = (trajectory.turns[0], replace(trajectory.turns[1], parent=None, new_messages=saw))
    with closing(create_run(tmp_path / "run", CONFIG)) as writer:
        record_all(writer, [AttemptStarted(trajectory.attempt, "train", 0)])
        record_all(writer, [AttemptFinished(replace(trajectory, turns=turns))])
    assert main(["show", str(tmp_path / "run"), "10.3"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "answer the answer 42" in words
    assert re.search(r"turn 1 .* a new branch .* user Take the neighbor\. .*call search\(query='Bruno'\) policy", words)
    assert main(["show", str(tmp_path / "run"), "10.3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["answer"] == "the answer 42"
    states = [[message["text"] for message in turn["state"]] for turn in data["turns"]]
    assert states == [[], ["Take the neighbor.", ""]]

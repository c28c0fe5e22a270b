"""``--encoder`` searches the passages of the questions, or of a file, with a sentence encoder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.trajectory import AttemptId
from agent_r1.retrieval.retriever import Passage
from agent_r1.tasksets import build


@pytest.fixture
def questions(passages: tuple[Passage, ...], tmp_path: Path) -> Path:
    context = [[passage.title, [passage.text]] for passage in passages]
    question = {
        "question": "Who was a king?",
        "answer": "Bruno",
        "context": context,
        "supporting_facts": [["Bruno", 0]],
    }
    path = tmp_path / "hotpot.json"
    path.write_text(
        json.dumps([question | {"_id": str(n), "question": f"Who was king {n}?"} for n in range(4)]), "utf-8"
    )
    return path


@pytest.mark.parametrize("from_file", [False, True])
def test_the_search_of_a_task_set_uses_the_encoder(
    from_file: bool,
    passages: tuple[Passage, ...],
    questions: Path,
    encoder_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"title": one.title, "text": one.text}) for one in passages), "utf-8")
    taskset = build("hotpotqa", questions, corpus if from_file else None, 0, encoder=str(encoder_folder))

    async def search() -> str:
        task = taskset.tasks("test")[0]
        episode = await taskset.env.open(task, RolloutContext(AttemptId("run", task.id, 0, 0), 0))
        call = ToolCall("c", "search", {"query": "a king, born in Carla"}, "")
        return str((await episode.step(Action(Message.assistant("", (call,)), ""))).results[0].parts[0])

    assert asyncio.run(search()).index("Bruno was a king") < 60
    cached = list((tmp_path / "home" / ".cache" / "agent-r1" / "vectors").glob("*/vectors.npy"))
    assert len(cached) == 1

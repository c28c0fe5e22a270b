"""The multi-hop task sets as the commands use them, and the registry of task sets."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import SHARED, real_data

import agent_r1.tasksets.multihop
from agent_r1.core.environment import Env, RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Rewards, Status, Trajectory, Turn
from agent_r1.retrieval.retriever import RetrievalError
from agent_r1.tasksets import build
from agent_r1.tasksets.multihop import MAX_OUTPUT


def official(number: int) -> dict[str, Any]:
    """Return a question in HotpotQA's format whose supporting passages have its name."""
    name = f"Person{number:02}"
    context = [
        [name, [f"{name} lives in City{number:02}."]],
        [f"City{number:02}", [f"City{number:02} is on River{number:02}."]],
    ]
    facts = [[name, 0], [f"City{number:02}", 0]]
    question = {"question": f"On which river is the city of {name}?", "answer": f"River{number:02}"}
    return question | {"context": context, "supporting_facts": facts, "_id": f"id{number}"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([official(number) for number in range(20)]), "utf-8")
    return path


def corpus_of(folder: Path, *titles: str) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text(
        "\n".join(json.dumps({"title": title, "text": f"{title} is a place."}) for title in titles), "utf-8"
    )
    return path


def play(env: Env, task: Task, *actions: Action) -> Trajectory:
    async def run() -> Trajectory:
        episode = await env.open(task, RolloutContext(AttemptId("run", task.id, 0, 0), 0))
        turns = []
        for index, action in enumerate(actions):
            step = await episode.step(action)
            turns.append(Turn(index, None, (), (), (), (), "stop", action, step.messages, step.results))
        return Trajectory(AttemptId("run", task.id, 0, 0), task.id, tuple(turns), Status.COMPLETED, start=episode.start)

    return asyncio.run(run())


def rewards_of(taskset: TaskSet, trajectory: Trajectory, task: Task) -> Rewards:
    rewards: dict[str, Any] = {}
    for scorer in taskset.scorers:
        rewards |= asyncio.run(scorer.score([trajectory], task))[0]
    return rewards


def action_of(text: str, *queries: str) -> Action:
    calls = tuple(ToolCall(f"c{i}", "search", {"query": query}, "") for i, query in enumerate(queries))
    return Action(Message.assistant(text, calls), text)


def test_every_split_has_its_own_tasks(data: Path) -> None:
    taskset = build("hotpotqa", data, None, 0)
    tasks = {split: taskset.tasks(split) for split in ("train", "validation", "test")}
    assert {split: len(some) for split, some in tasks.items()} == {"train": 14, "validation": 2, "test": 4}
    assert len({task.id for some in tasks.values() for task in some}) == 20
    assert all(
        task.split == split and task.id.startswith(f"{split}/") for split, some in tasks.items() for task in some
    )
    assert (taskset.name, taskset.evaluation, taskset.validation) == ("hotpotqa", ("test",), "validation")
    with pytest.raises(InvalidInput, match="use one that it has: train, validation, test"):
        taskset.tasks("dev")


def test_gold_answers_earn_full_rewards_and_wrong_answers_do_not(data: Path) -> None:
    taskset = build("hotpotqa", data, None, 0)
    for task in (*taskset.tasks("train"), *taskset.tasks("test")):
        (answer,) = task.data["answers"]
        right = play(taskset.env, task, action_of("", task.messages[0].text), action_of(f"<answer>{answer}</answer>"))
        assert rewards_of(taskset, right, task) == {"em": 1.0, "f1": 1.0, "sub_match": 1.0, "gated": 1.0}
        wrong = play(taskset.env, task, action_of("<answer>Nowhere</answer>"))
        assert rewards_of(taskset, wrong, task) == {"em": 0.0, "f1": 0.0, "sub_match": 0.0, "gated": 0.0}
        untagged = play(taskset.env, task, action_of("", ""), action_of(answer))
        assert rewards_of(taskset, untagged, task) == {"em": 0.0, "f1": 0.0, "sub_match": 0.0, "gated": -0.5}


def test_the_recipe_weights_the_gated_reward_only_and_names_every_reward(data: Path) -> None:
    taskset = build("hotpotqa", data, None, 0)
    task = taskset.tasks("test")[0]
    weights = taskset.recipe["reward_weights"]
    assert weights.keys() == rewards_of(taskset, play(taskset.env, task, action_of("x")), task).keys()
    assert {name for name, weight in weights.items() if weight} == {"gated"}


def test_an_agent_can_find_the_answer_in_two_searches(data: Path) -> None:
    taskset = build("hotpotqa", data, None, 0)
    task = taskset.tasks("train")[0]
    number = task.data["answers"][0].removeprefix("River")
    attempt = play(taskset.env, task, action_of("", f"Person{number}"), action_of("", f"City{number}"))
    assert [message.role for message in attempt.start] == ["system", "user"]
    assert f"lives in City{number}" in attempt.turns[0].observation[0].text
    assert f"is on River{number}" in attempt.turns[1].observation[0].text
    assert attempt.turns[0].results[0].data[0] == f"Person{number}"


def test_naive_rag_gets_the_passages_of_the_search_tool(data: Path) -> None:
    taskset = build("hotpotqa", data, None, 0)
    task = taskset.tasks("test")[0]
    question = task.messages[-1].text
    agent = play(taskset.env, task, action_of("", question))
    rag = play(taskset.baselines["naive-rag"], task, action_of("x"))
    assert rag.start[-1].text == f"{agent.turns[0].observation[0].text}\n\n{question}"
    assert "search tool" in agent.start[0].text
    assert [message.role for message in rag.start] == ["system", "user"]
    assert "search tool" not in rag.start[0].text
    assert taskset.baselines["naive-rag"].tools == ()


def test_recall_counts_supporting_titles(data: Path, tmp_path: Path) -> None:
    own = build("hotpotqa", data, None, 0)
    assert own.retrieval is not None
    # The question names the person, not the city: one search finds half of the supporting passages.
    assert own.retrieval("test") == {"recall@5": 0.5}
    elsewhere = build("hotpotqa", data, corpus_of(tmp_path, "Nowhere"), 0)
    assert elsewhere.retrieval is not None
    assert elsewhere.retrieval("test") == {"recall@5": 0.0}


def test_a_failing_retriever_removes_the_metric_and_does_not_stop_the_run(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Down:
        def search(self, queries: list[str], k: int = 5) -> Any:
            raise RetrievalError("nobody answers")

    monkeypatch.setattr(agent_r1.tasksets.multihop, "open_retriever", lambda *corpus: Down())
    taskset = build("hotpotqa", data, "http://127.0.0.1:1", 0)
    assert taskset.retrieval is not None and taskset.retrieval("test") == {}
    assert "recall@5 of test was not measured: nobody answers" in caplog.text


def test_a_corpus_is_required_without_passages(data: Path) -> None:
    data.write_text(json.dumps([{"question": f"q{i}?", "answer": "x"} for i in range(5)]), "utf-8")
    with pytest.raises(InvalidInput, match="--corpus for musique: got nothing"):
        build("musique", data, None, 0)


def test_without_validation_questions_the_last_step_is_kept(tmp_path: Path) -> None:
    for split, numbers in (("train", range(4)), ("test", range(4, 6))):
        (tmp_path / f"{split}.json").write_text(json.dumps([official(number) for number in numbers]), "utf-8")
    taskset = build("hotpotqa", tmp_path, None, 0)
    assert taskset.validation is None
    assert len(taskset.tasks("test")) == 2
    with pytest.raises(InvalidInput, match="use one that it has: train, test"):
        taskset.tasks("validation")


# ---- the registry


# ---- the benchmarks' own files, and the examples


@real_data
@pytest.mark.parametrize(
    ("name", "data", "corpus", "sizes"),
    [
        ("hotpotqa", "hotpotqa_train_60.json", "hotpotqa_corpus.jsonl", (42, 6, 12)),
        ("hotpotqa", "hotpotqa_dev_500.jsonl", "hotpotqa_corpus.jsonl", (350, 50, 100)),
        ("2wiki", "2wiki_250.json", "2wiki_corpus.jsonl", (175, 25, 50)),
        ("musique", "musique_250.json", "2wiki_corpus.jsonl", (175, 25, 50)),
    ],
)
def test_tasksets_of_the_benchmarks(name: str, data: str, corpus: str | None, sizes: tuple[int, int, int]) -> None:
    taskset = build(name, SHARED / data, SHARED / corpus if corpus else None, 0)
    assert tuple(len(taskset.tasks(split)) for split in ("train", "validation", "test")) == sizes
    task = taskset.tasks("test")[0]
    attempt = play(
        taskset.env,
        task,
        action_of("", task.messages[0].text),
        action_of(f"<answer>{task.data['answers'][0]}</answer>"),
    )
    assert rewards_of(taskset, attempt, task) == {"em": 1.0, "f1": 1.0, "sub_match": 1.0, "gated": 1.0}
    assert 100 < len(attempt.turns[0].observation[0].text) <= MAX_OUTPUT + 50
    assert (taskset.retrieval is not None) == (data == "hotpotqa_train_60.json")


@pytest.mark.parametrize(
    "name",
    [
        module.name
        for module in pkgutil.iter_modules(agent_r1.tasksets.multihop.__path__, "agent_r1.tasksets.multihop.")
    ],
)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(
    ("name", "corpus", "message"),
    [
        ("hotpotqa", "http://127.0.0.1:9", "encoder: got x for a search with settings of its own; leave it out"),
        ("hotpotqa", "search.toml", "name the encoder where search.toml is defined"),
    ],
)
def test_an_encoder_that_would_not_be_used_is_refused(name: str, corpus: str | None, message: str, data: Path) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        build(name, None if name == "tinywiki" else data, corpus, 0, encoder="x")

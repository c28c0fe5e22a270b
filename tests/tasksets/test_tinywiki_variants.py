"""Variants of TinyWiki: other wordings, a renamed tool, an unseen relation; the original splits are unchanged."""

import asyncio
import hashlib

import pytest

from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId
from agent_r1.tasksets import tinywiki
from agent_r1.tasksets.tinywiki.questions import PARAPHRASES, STYLES
from agent_r1.tasksets.tinywiki.wiki import RELATIONS, REPLACED_RELATION, UNSEEN_RELATION, Chain, open_wiki

PUBLISHED = {
    (0, "train"): "9126334f23fc201b",
    (1, "train"): "8d7c87c87155d962",
    (0, "validation"): "272c3cf7b95477e1",
    (0, "style-a"): "9b849e3b5ba2aa85",
    (0, "style-b"): "faa54d9f5583f03b",
    (0, "three-hop"): "0ea960b99060f76a",
    (0, "one-hop"): "319d680271db51ce",
}
"""Hashes of the splits by seed at the time of the published results."""


@pytest.fixture(scope="module")
def taskset() -> TaskSet:
    return tinywiki.build(seed=0)


@pytest.mark.parametrize(("seed", "split"), PUBLISHED)
def test_the_splits_of_published_results_are_unchanged(seed: int, split: str) -> None:
    tasks = tinywiki.build(seed).tasks(split)
    rows = [
        (t.id, [m.text for m in t.messages], t.data["answers"], t.data["wiki"], repr(t.data["chain"])) for t in tasks
    ]
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == PUBLISHED[seed, split]


def test_paraphrases_ask_the_same_in_untrained_wordings(taskset: TaskSet) -> None:
    chain = Chain("Alba", ("mayor", "capital"), ("Bruno", "Corin"))
    assert [wording(chain) for wording in PARAPHRASES.values()] == [
        "Who is the capital of the mayor of Alba?",
        "Find the capital of the mayor of Alba.",
        "Alba: what is the capital of the mayor of it?",
        "Take the mayor, then the capital. Start at Alba. Who is it?",
    ]
    for task in taskset.tasks("paraphrased"):
        assert task.messages[-1].text not in {style(task.data["chain"]) for style in STYLES.values()}


def test_the_unseen_relation_is_in_every_question_of_its_split_and_in_no_other(taskset: TaskSet) -> None:
    assert UNSEEN_RELATION not in RELATIONS
    for task in taskset.tasks("unseen-relation"):
        assert UNSEEN_RELATION in task.data["chain"].relations and REPLACED_RELATION not in task.messages[-1].text
    for split in ("train", "validation", *taskset.evaluation):
        assert not any(UNSEEN_RELATION in task.messages[-1].text for task in taskset.tasks(split))


def test_wikis_with_the_unseen_relation_differ_from_the_test_wikis_in_one_word() -> None:
    known, unseen = open_wiki("test/0"), open_wiki("unseen/0")
    for title in known.titles:
        assert unseen.page(title) == known.page(title).replace(REPLACED_RELATION, UNSEEN_RELATION)
    assert any(UNSEEN_RELATION in unseen.page(title) for title in unseen.titles)


@pytest.mark.parametrize(("name", "ok"), [("find", True), ("search", False)])
def test_the_renamed_tool_has_only_its_new_name(taskset: TaskSet, name: str, ok: bool) -> None:
    task = taskset.tasks("renamed-tool")[0]
    call = ToolCall("c", name, {"query": task.data["chain"].start}, "")

    async def step() -> bool:
        episode = await taskset.env_for_split("renamed-tool").open(
            task, RolloutContext(AttemptId("run", task.id, 0, 0), 0)
        )
        return (await episode.step(Action(Message.assistant("", (call,)), ""))).results[0].ok

    assert asyncio.run(step()) is ok
    assert [tool.name for tool in taskset.env_for_split("style-a").tools] == ["search"]

"""TinyWiki as a task set: splits, questions, the retriever, and scripted episodes."""

import asyncio
import json

import pytest

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId
from agent_r1.tasksets import tinywiki
from agent_r1.tasksets.tinywiki.questions import SPLITS
from agent_r1.tasksets.tinywiki.wiki import Chain, open_wiki, retrieve

CONTEXT = RolloutContext(AttemptId("test", "task", 0, 0), seed=0)


@pytest.fixture(scope="module")
def taskset() -> TaskSet:
    return tinywiki.build(seed=0)


def chain_of(task: Task) -> Chain:
    return task.data["chain"]


def question_of(task: Task) -> str:
    return task.messages[-1].text


def hops(tasks: tuple[Task, ...]) -> list[int]:
    return [len(chain_of(task).relations) for task in tasks]


def is_forward(task: Task) -> bool:
    return question_of(task).startswith("Start at ")


def test_the_gold_chain_leads_to_the_answer(taskset: TaskSet) -> None:
    for split in SPLITS:
        for task in taskset.tasks(split)[:60]:
            at = chain_of(task).start
            for relation in chain_of(task).relations:
                at = open_wiki(task.data["wiki"]).facts[at][relation]
            assert task.data["answers"] == (at,)


def test_the_two_styles_ask_the_same_in_different_words(taskset: TaskSet) -> None:
    nested, forward = taskset.tasks("style-a")[1], taskset.tasks("style-b")[1]
    first, second = chain_of(nested).relations
    assert question_of(nested) == f"What is the {second} of the {first} of {chain_of(nested).start}?"
    first, second = chain_of(forward).relations
    start = chain_of(forward).start
    assert question_of(forward) == f"Start at {start}. Take the {first}, then the {second}. Who is it?"


@pytest.mark.parametrize("split", ["style-a", "style-b"])
def test_a_quarter_of_each_prefix_of_a_style_is_one_hop(taskset: TaskSet, split: str) -> None:
    tasks = taskset.tasks(split)
    assert len(tasks) >= 300 and {is_forward(task) for task in tasks} == {split == "style-b"}
    for n in (100, 200, 300):
        assert hops(tasks[:n]).count(1) == n // 4 and hops(tasks[:n]).count(2) == n - n // 4


def test_three_hop_questions_are_never_trained_on(taskset: TaskSet) -> None:
    assert set(hops(taskset.tasks("train"))) == {1, 2}
    assert set(hops(taskset.tasks("three-hop"))) == {3} and len(taskset.tasks("three-hop")) >= 300
    assert set(hops(taskset.tasks("one-hop"))) == {1} and len(taskset.tasks("one-hop")) >= 300
    assert hops(taskset.tasks("validation")).count(3) * 3 == len(taskset.tasks("validation"))


def test_the_seed_draws_the_training_wikis_only(taskset: TaskSet) -> None:
    other = tinywiki.build(seed=1)
    assert other.tasks("train")[:20] != taskset.tasks("train")[:20]
    for split in ("validation", *taskset.evaluation):
        assert other.tasks(split) == taskset.tasks(split)
    assert tinywiki.tasks.__wrapped__("train", 1) == other.tasks("train")


def test_the_retriever_finds_a_page_by_title_and_by_question(taskset: TaskSet) -> None:
    for split in ("style-a", "style-b", "three-hop"):
        for task in taskset.tasks(split)[:40]:
            wiki, start = open_wiki(task.data["wiki"]), chain_of(task).start
            assert retrieve(wiki, start) == retrieve(wiki, question_of(task)) == wiki.page(start)


def call(query: str) -> Action:
    arguments = {"query": query}
    raw = json.dumps({"name": "search", "arguments": arguments})
    return Action(Message.assistant("", (ToolCall("call_0", "search", arguments, raw),)), raw)


def test_an_episode_searches_the_wiki_of_its_task(taskset: TaskSet) -> None:
    async def play(task: Task) -> str:
        episode = await taskset.env.open(task, CONTEXT)
        transition = await episode.step(call(chain_of(task).start))
        await episode.close()
        assert transition.end is None
        return transition.messages[0].text

    for task in (taskset.tasks("style-a")[0], taskset.tasks("style-a")[4]):
        assert asyncio.run(play(task)) == open_wiki(task.data["wiki"]).page(chain_of(task).start)


def test_a_search_that_finds_a_page_is_rewarded(taskset: TaskSet) -> None:
    task = taskset.tasks("style-a")[0]
    unknown = ToolCall("call_0", "find", {"query": chain_of(task).start}, "")
    broken = ToolCall("call_0", "search", None, "{", "the call is not valid JSON")
    tries = (*call(chain_of(task).start).message.calls, *call("nobody").message.calls, unknown, broken)

    async def play() -> Transition:
        episode = await taskset.env.open(task, CONTEXT)
        return await episode.step(Action(Message.assistant("", tries), ""))

    assert [given["found"] for given in asyncio.run(play()).call_rewards] == [1.0, 0.0, 0.0, 0.0]
    assert taskset.recipe["reward_weights.found"] == 0.0


def test_naive_rag_gets_the_page_that_the_tool_finds(taskset: TaskSet) -> None:
    task = taskset.tasks("style-b")[2]
    start = asyncio.run(taskset.baselines["naive-rag"].open(task, CONTEXT)).start
    page = open_wiki(task.data["wiki"]).page(chain_of(task).start)
    assert start == (task.messages[0], Message.user(f"{page}\n\n{question_of(task)}"))

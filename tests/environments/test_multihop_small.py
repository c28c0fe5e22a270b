"""Multi-hop questions with short results: which questions train, the order of their pages, and what is shown."""

import asyncio

import pytest
from multihop_pages import PAGES, write_multihop

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import AttemptId
from agent_r1.training.check import play_solutions
from environments.multihop_small import WORDS, build


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_multihop(tmp_path_factory.mktemp("multihop"))


@pytest.fixture(scope="module")
def taskset(files):
    return build(files[0], 0, files[1])


def test_training_has_the_questions_whose_pages_lead_to_each_other_and_to_the_answer(taskset):
    assert sorted(task.id for task in taskset.tasks("train")) == [
        "train/a/bridge", "train/a/comparison", "train/a/yes",
    ]  # fmt: skip
    assert [task.id for task in taskset.tasks("b")] == ["b/b/t"]


def test_solutions_search_in_the_order_in_which_pages_are_named_and_earn_every_reward(taskset):
    played = asyncio.run(play_solutions(taskset, "train", taskset.tasks("train")))
    queries = {
        one.task_id.split("/")[-1]: [
            call.arguments["query"] for turn in one.turns for call in turn.action.message.calls
        ]
        for one in played
    }
    assert queries["bridge"] == ["Nils Aaberg", "Orrby"]
    assert sorted(queries["comparison"]) == ["Blow (film)", "Salt"]
    assert all(one.rewards["em"] == one.rewards["supported"] == 1.0 for one in played)
    # a result has at most the first words of a page, and ends with the question
    (result,) = next(one for one in played if one.task_id.endswith("bridge")).turns[1].observation
    assert "harbor" in result.text and "mayor" not in result.text
    assert len(result.text.split()) < 3 * WORDS and result.text.endswith("In which county was Nils Aaberg born?")


def test_the_row_with_the_supporting_passages_shows_them_and_the_question(taskset):
    (task,) = taskset.tasks("b")

    async def opening(method):
        context = RolloutContext(AttemptId("run", task.id, 0, 0), 0)
        return (await taskset.baselines[method].open(task, context)).start

    given = asyncio.run(opening("gold-passages"))[-1].text
    assert given == f"[1] Nils Aaberg\n{PAGES['Nils Aaberg']}\n\nWho is Nils Aaberg?"
    assert asyncio.run(opening("with-examples"))[-1].text == "Who is Nils Aaberg?"


def test_without_a_corpus_one_line_says_what_to_give(files):
    with pytest.raises(InvalidInput, match="--corpus: got nothing; give the file of passages"):
        build(files[0], 0)

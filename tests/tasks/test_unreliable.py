"""The search that fails and gives old pages: what it does, how often, and what a failure costs."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from agent_r1.core.attempt import Attempt
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action
from agent_r1.core.solution import calling
from agent_r1.core.task import Task
from agent_r1.core.world import Context, Transition
from agent_r1.env.feedback import Fault
from agent_r1.tasks import unreliable
from agent_r1.tasks.tinywiki.wiki import open_wiki

WORLD = unreliable.build(None, None, seed=0)
TRAIN = WORLD.tasks("train")


def searched(task: Task, *titles: str, member: int = 0) -> list[Transition]:
    """What searches for these titles come to, one per turn."""

    async def live() -> list[Transition]:
        episode = await WORLD.env.open(task, Context(Attempt("run", task.id, 0, member), member))
        calls = (calling("search", query=title) for title in titles)
        steps = [await episode.step(Action(message, "")) for message in calls]
        await episode.close()
        return steps

    return asyncio.run(live())


def told(steps: list[Transition]) -> list[str]:
    return [step.messages[0].text for step in steps if step.messages]


def test_all_attempts_at_a_task_meet_the_same_luck_and_tasks_differ() -> None:
    start = TRAIN[0].data["chain"].start
    assert told(searched(TRAIN[0], *[start] * 6)) == told(searched(TRAIN[0], *[start] * 6, member=7))
    of_start = [(task, task.data["chain"].start) for task in TRAIN[:50]]
    fortunes = {tuple(unreliable.fortune(task, start, n) for n in range(1, 7)) for task, start in of_start}
    assert len(fortunes) > 20


RATES = [("train", 0.2, 0.2), ("failing", 0.3, 0.0), ("old-pages", 0.0, 0.3)]


@pytest.mark.parametrize(("split", "failed", "old"), RATES)
def test_the_rates_of_a_split_are_kept(split: str, failed: float, old: float) -> None:
    tasks = WORLD.tasks(split)[:400]
    seen = Counter(unreliable.fortune(task, task.data["chain"].start, n) for task in tasks for n in (1, 2, 4, 5))
    assert seen["failed"] / seen.total() == pytest.approx(failed, abs=0.04)
    assert seen["old"] / seen.total() == pytest.approx(old, abs=0.04)


def test_only_the_truth_is_read_twice_alike_and_soon() -> None:
    """Whatever the luck: among the first six readings of a page the fresh one comes twice, and no old one does."""
    for task in TRAIN[:200]:
        title = task.data["chain"].start
        given = [time for time in range(1, 7) if unreliable.fortune(task, title, time) != "failed"]
        read = Counter(unreliable.edition(task, title, time) for time in given)
        assert [page for page, times in read.items() if times > 1] == [open_wiki(task.data["wiki"]).page(title)]


def test_no_search_of_the_reliable_split_is_anything_but_fresh() -> None:
    assert {unreliable.fortune(task, "Alban", n) for task in WORLD.tasks("reliable") for n in range(1, 9)} == {"fresh"}


def test_a_failure_is_told_to_the_agent_and_costs_its_turn() -> None:
    task = next(task for task in TRAIN if unreliable.fortune(task, task.data["chain"].start, 1) == "failed")
    steps = searched(task, *[task.data["chain"].start] * unreliable.MAX_TURNS)
    assert steps[0].results[0].error == Fault.RAISED and not steps[0].results[0].ok
    assert told(steps)[0] == "search failed: ConnectionError: try again"
    assert [step.end for step in steps] == [None] * (unreliable.MAX_TURNS - 1) + ["truncated"]


def test_an_old_page_has_the_values_elsewhere_and_the_next_old_one_differs() -> None:
    wiki = open_wiki("train/0/0")
    title = wiki.titles[0]
    editions = [unreliable.old(wiki, title, time).facts[title] for time in (1, 2, 4, 5)]
    for edition in editions:
        assert list(edition) == list(wiki.facts[title])
        assert not set(edition.items()) & set(wiki.facts[title].items())
    assert len({tuple(edition.values()) for edition in editions}) == len(editions)


def test_the_reading_that_believes_the_first_page_is_misled_by_old_ones() -> None:
    """Cross-checking pays: where the first reading is old, its value is not the answer."""
    misled = [
        task
        for task in WORLD.tasks("old-pages")
        if len(task.data["chain"].relations) == 1 and unreliable.fortune(task, task.data["chain"].start, 1) == "old"
    ]
    assert misled
    for task in misled:
        chain = task.data["chain"]
        (first,) = told(searched(task, chain.start))
        assert f"{chain.relations[0]} {chain.answer}." not in first


def test_a_split_or_a_file_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="reliable"):
        WORLD.tasks("nothing")
    with pytest.raises(InvalidInput, match="unreliable is generated"):
        unreliable.build(None, "corpus.jsonl", 0)


def test_a_page_that_is_not_there_is_said_plainly() -> None:
    assert told(searched(TRAIN[0], "Nowhere")) == ["No page."]

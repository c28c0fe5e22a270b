"""The search that fails and shows old pages: its faults, their rates, and the cost of a failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action
from agent_r1.core.task import Task
from agent_r1.core.taskset import tool_call
from agent_r1.core.trajectory import AttemptId
from agent_r1.tasksets.tinywiki.wiki import open_wiki
from agent_r1.tools.tool_errors import ToolErrorKind
from environments import unreliable

WORLD = unreliable.build(seed=0)
TRAIN = WORLD.tasks("train")


def search_results(task: Task, *titles: str, member: int = 0) -> list[Transition]:
    async def run() -> list[Transition]:
        episode = await WORLD.env.open(task, RolloutContext(AttemptId("run", task.id, 0, member), member))
        calls = (tool_call("search", query=title) for title in titles)
        steps = [await episode.step(Action(message, "")) for message in calls]
        await episode.close()
        return steps

    return asyncio.run(run())


def texts_of(steps: list[Transition]) -> list[str]:
    return [step.messages[0].text for step in steps if step.messages]


def test_all_attempts_at_a_task_get_the_same_random_faults() -> None:
    start = TRAIN[0].data["chain"].start
    assert texts_of(search_results(TRAIN[0], *[start] * 6)) == texts_of(
        search_results(TRAIN[0], *[start] * 6, member=7)
    )
    of_start = [(task, task.data["chain"].start) for task in TRAIN[:50]]
    fortunes = {tuple(unreliable.search_outcome(task, start, n) for n in range(1, 7)) for task, start in of_start}
    assert len(fortunes) > 20


RATES = [("train", 0.2, 0.2), ("failing", 0.3, 0.0), ("old-pages", 0.0, 0.3)]


@pytest.mark.parametrize(("split", "failed", "old"), RATES)
def test_the_rates_of_a_split_are_kept(split: str, failed: float, old: float) -> None:
    tasks = WORLD.tasks(split)[:400]
    outcomes = Counter(
        unreliable.search_outcome(task, task.data["chain"].start, n) for task in tasks for n in range(1, 7)
    )
    decided = outcomes.total() * 2 / 3  # one of every three searches is current in any case
    assert outcomes["failed"] / decided == pytest.approx(failed, abs=0.04)
    assert outcomes["old"] / decided == pytest.approx(old, abs=0.04)


def test_only_the_current_page_repeats_within_six_searches() -> None:
    for task in TRAIN[:200]:
        title = task.data["chain"].start
        given = [time for time in range(1, 7) if unreliable.search_outcome(task, title, time) != "failed"]
        read = Counter(unreliable.edition(task, title, time) for time in given)
        assert [page for page, times in read.items() if times > 1] == [open_wiki(task.data["wiki"]).page(title)]


def test_no_old_edition_of_a_page_repeats() -> None:
    for task in TRAIN[:100]:
        title = task.data["chain"].start
        times = range(1, 67)
        old = [
            unreliable.old(task, title, time).page(title) for time in times if not is_always_current(task, title, time)
        ]
        assert len(old) == 44 == len(set(old))


def is_always_current(task: Task, title: str, time: int) -> bool:
    """Return whether a search is current at every rate of faults."""
    hopeless = replace(task, data={**task.data, "rates": unreliable.Rates(failed=1.0, old=0.0)})
    return unreliable.search_outcome(hopeless, title, time) == "fresh"


def test_one_random_search_of_every_three_is_current() -> None:
    outcomes = [
        [is_always_current(task, task.data["chain"].start, time) for time in range(1, 10)] for task in TRAIN[:150]
    ]
    assert all(sum(one[start : start + 3]) == 1 for one in outcomes for start in (0, 3, 6))
    for place in range(9):
        assert sum(one[place] for one in outcomes) / len(outcomes) == pytest.approx(1 / 3, abs=0.12)
    assert any(unreliable.search_outcome(task, task.data["chain"].start, 3) == "old" for task in TRAIN[:150])


def test_every_search_of_the_reliable_split_is_current() -> None:
    assert {unreliable.search_outcome(task, "Alban", n) for task in WORLD.tasks("reliable") for n in range(1, 9)} == {
        "fresh"
    }


def test_a_failure_is_reported_to_the_agent_and_uses_a_turn() -> None:
    task = next(task for task in TRAIN if unreliable.search_outcome(task, task.data["chain"].start, 1) == "failed")
    steps = search_results(task, *[task.data["chain"].start] * unreliable.MAX_TURNS)
    assert steps[0].results[0].error == ToolErrorKind.RAISED and not steps[0].results[0].ok
    assert texts_of(steps)[0] == "search failed: ConnectionError: try again"
    assert [step.end for step in steps] == [None] * (unreliable.MAX_TURNS - 1) + ["truncated"]


def test_old_pages_swap_values_and_differ_from_each_other() -> None:
    task, title = TRAIN[0], TRAIN[0].data["chain"].start
    facts = open_wiki(task.data["wiki"]).facts[title]
    times = [time for time in range(1, 7) if not is_always_current(task, title, time)]
    editions = [unreliable.old(task, title, time).facts[title] for time in times]
    for edition in editions:
        assert list(edition) == list(facts)
    for one, other in combinations([facts, *editions], 2):
        assert not set(one.items()) & set(other.items())


def test_trusting_the_first_page_fails_on_old_pages() -> None:
    misled = [
        task
        for task in WORLD.tasks("old-pages")
        if len(task.data["chain"].relations) == 1
        and unreliable.search_outcome(task, task.data["chain"].start, 1) == "old"
    ]
    assert misled
    for task in misled:
        chain = task.data["chain"]
        (first,) = texts_of(search_results(task, chain.start))
        assert f"{chain.relations[0]} {chain.answer}." not in first


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(InvalidInput, match="reliable"):
        WORLD.tasks("nothing")


def test_a_missing_page_is_reported() -> None:
    assert texts_of(search_results(TRAIN[0], "Nowhere")) == ["No page."]

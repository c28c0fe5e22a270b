"""Pages of attempts are found by key, in every order and both directions, and conversations are searched."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from viewed_runs import make_trajectory, write_run

from agent_r1.core.events import AttemptFinished, AttemptStarted
from agent_r1.core.messages import Message
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.store import attempt_search as search
from agent_r1.store.attempt_list import ORDERS, AttemptFilter, AttemptOrder
from agent_r1.store.attempt_search import AttemptList
from agent_r1.store.folder import create_run, reopen_run
from agent_r1.store.reader import RunReader


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "demo"
    write_run(folder, steps=5, complete=False)
    return folder


@pytest.fixture
def reader(run: Path) -> Iterator[RunReader]:
    with closing(RunReader(run)) as reader:
        yield reader


def pages(reader: RunReader, listed: AttemptList, limit: int, **options: bool) -> list[AttemptId]:
    """Return the attempts of all pages, found one after the other."""
    found, after = [], None
    while True:
        page = reader.page_attempts(listed, after=after, limit=limit, **options)
        found += [one.attempt for one in page.attempts]
        after = page.last
        if after is None:
            return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("descending", [True, False])
def test_pages_of_every_order_join_without_gaps_or_repetitions(
    reader: RunReader, order: AttemptOrder, descending: bool
) -> None:
    listed = AttemptList(order=order, descending=descending)
    whole = [one.attempt for one in reader.page_attempts(listed, limit=100).attempts]
    assert len(whole) == 21 and len(set(whole)) == 21
    for limit in (1, 4, 21):
        assert pages(reader, listed, limit) == whole
    last = whole[-1]
    before = [one.attempt for one in reader.page_attempts(listed, after=last, limit=100, backwards=True).attempts]
    assert before == whole[-2::-1]


def test_attempts_without_a_value_come_last_in_both_directions(reader: RunReader) -> None:
    for descending in (True, False):
        listed = AttemptList(order="reward", descending=descending)
        rewards = [one.reward for one in reader.page_attempts(listed, limit=100).attempts]
        known = [reward for reward in rewards if reward is not None]
        assert known == sorted(known, reverse=descending) and rewards[len(known) :] == [None] * (21 - len(known))


def test_a_page_after_an_unknown_attempt_is_empty(reader: RunReader) -> None:
    assert not reader.page_attempts(AttemptList(), after=AttemptId("demo", "x", 1, 1)).attempts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("WHO RULES alba3?", 4),  # an argument of a call
        ("ruler bruno", 20),  # a result
        ("i have to look", 20),  # reasoning
        ("ruler of alba5", 4),  # an opening message
        ("no route to the wiki", 5),  # a reason
        ("style-a/99", 1),  # an id of an attempt that has not ended
        ("tool_call_", 0),
        ("reasoning", 0),  # the name of a field is no text
        ("assistant", 0),  # nor is the role of a message
        ("zebra", 0),
    ],
)
def test_texts_of_conversations_and_reasons_are_found_in_any_case(reader: RunReader, text: str, found: int) -> None:
    page = reader.page_attempts(AttemptList(text=text), limit=100)
    assert (len(page.attempts), page.searched, page.last) == (found, 21, None)


def test_a_search_is_restricted_by_the_filter(reader: RunReader) -> None:
    where = AttemptFilter(status=Status.ENVIRONMENT_FAILED, step=2)
    page = reader.page_attempts(AttemptList(where, text="bruno"), limit=100)
    assert [one.attempt.sort_key for one in page.attempts] == [(1, 3, 0)] and page.searched == 1


def test_letters_outside_ascii_quotes_and_wildcards_are_found(tmp_path: Path) -> None:
    with closing(create_run(tmp_path / "demo", {"steps": 1})) as writer:
        for index, text in enumerate(("Ångström in Zürich", 'she said "100%_"\n\tyes', "\ud800 日本語")):
            trajectory = replace(make_trajectory("demo", 1, index), start=(Message.user(text),))
            asyncio.run(writer.record(AttemptStarted(trajectory.attempt, "train", 0), AttemptFinished(trajectory)))
    with closing(RunReader(tmp_path / "demo")) as reader:
        for text, index in (("ångström IN zürich", 0), ('"100%_"', 1), ('"\n\ty', 1), ("日本", 2), ("\ud800", 2)):
            page = reader.page_attempts(AttemptList(text=text))
            assert [one.attempt.sample_index for one in page.attempts] == [index], text


def test_a_search_that_takes_too_long_ends_and_can_be_continued(
    reader: RunReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SEARCH_SECONDS", -1.0)
    monkeypatch.setattr(search, "SEARCHED_AT_LEAST", 6)
    page = reader.page_attempts(AttemptList(text="alba1"), limit=100)
    assert page.searched == 6 and not page.attempts and page.last is not None
    assert len(pages(reader, AttemptList(text="alba1?"), 100)) == 4


def test_counts_are_those_of_attempts_that_are_not_superseded(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "demo"))
    with closing(RunReader(folder)) as reader:
        assert reader.count_fates() == {"trained": 15, "dropped": 5, "pending": 1}
        config = reader.config()
    with closing(reopen_run(folder)) as writer:
        writer.open_segment(3, config)  # supersedes the attempts of steps 4 and 5
        started = [AttemptStarted(AttemptId("demo", "style-a/50", 50, index), "train", 3) for index in range(2)]
        asyncio.run(writer.record(*started))
    with closing(RunReader(folder)) as reader:
        found = reader.list_attempts(limit=-1)
        assert reader.count_fates() == {"trained": 9, "dropped": 3, "pending": len(found) - 12}
        assert reader.count_statuses() == {Status.COMPLETED: 6, Status.OUT_OF_TURNS: 3, Status.ENVIRONMENT_FAILED: 3}


def test_an_attempt_is_found_by_its_id_without_the_name_of_the_run(reader: RunReader) -> None:
    found = reader.find_attempt("2.1.0:style-a/2")
    assert found is not None and found.attempt == AttemptId("demo", "style-a/2", 2, 1)
    assert reader.find_attempt("2.1.0") is None and reader.find_attempt("") is None

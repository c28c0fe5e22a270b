"""Attempts are filtered, sorted and divided into pages, and their token records and curves are read back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
from recorded_runs import record_all

from agent_r1.core.events import AttemptFinished, AttemptStarted
from agent_r1.core.trajectory import Status
from agent_r1.store.folder import create_run
from agent_r1.store.reader import AttemptFilter, AttemptOrder, RunReader


@pytest.fixture
def reader(resumed: Path) -> Iterator[RunReader]:
    with closing(RunReader(resumed)) as reader:
        yield reader


def places(reader: RunReader, where: AttemptFilter | None = None, **options: object) -> list[tuple[int, int, int]]:
    found = reader.list_attempts(where or AttemptFilter(), **options)  # type: ignore[arg-type]
    return [summary.attempt.sort_key for summary in found]


EVERY = [(group, index, 0) for group in range(4) for index in range(3)]


def test_every_current_attempt_is_in_the_list_once(reader: RunReader) -> None:
    assert sorted(places(reader)) == EVERY
    assert reader.count_attempts() == len(EVERY)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (AttemptFilter(group_id=3), [(3, 0, 0), (3, 1, 0), (3, 2, 0)]),
        (AttemptFilter(status=Status.COMPLETED), []),
        (AttemptFilter(fate="pending"), []),
        (AttemptFilter(fate="dropped", group_id=2), [(2, 2, 0)]),
        (AttemptFilter(split="test"), []),
        (AttemptFilter(text="ENGINE failed", group_id=0), [(0, 2, 0)]),
        (AttemptFilter(text="style_a"), []),
        (AttemptFilter(id_prefix="demo:2.1"), [(2, 1, 0)]),
        (AttemptFilter(id_prefix="2.1"), [(2, 1, 0)]),
        (AttemptFilter(id_prefix="%"), []),
    ],
)
def test_attempts_that_meet_all_conditions_are_listed(
    reader: RunReader, where: AttemptFilter, expected: list[tuple[int, int, int]]
) -> None:
    assert sorted(places(reader, where)) == expected
    assert reader.count_attempts(where) == len(expected)


def test_pages_join_to_the_whole_list_and_unknown_values_come_last(reader: RunReader) -> None:
    pages = [places(reader, sort="turns", descending=True, limit=5, offset=offset) for offset in (0, 5, 10)]
    assert sorted(place for page in pages for place in page) == EVERY
    assert {index for _, index, _ in pages[2]} == {2}  # the attempts that never ended
    assert places(reader, sort="credit", descending=True)[0][0] == 3  # the credit of a step is step / 3


@pytest.mark.parametrize("order", get_args(AttemptOrder))
@pytest.mark.parametrize("descending", [True, False])
def test_neighbors_are_those_of_the_list(reader: RunReader, order: AttemptOrder, descending: bool) -> None:
    where = AttemptFilter(split="train")
    listed = [one.attempt for one in reader.list_attempts(where, sort=order, descending=descending)]
    for before, attempt, after in zip([None, *listed], listed, [*listed[1:], None], strict=False):
        assert reader.neighbors(attempt, where, order, descending) == (before, after)
    assert reader.neighbors(listed[0], AttemptFilter(split="test"), order, descending) == (None, None)


def test_an_attempt_is_found_by_its_id_unless_it_was_superseded(reader: RunReader) -> None:
    found = reader.find_attempt("demo:2.1.0:style-a/2")
    assert found is not None and found.attempt.sort_key == (2, 1, 0)
    assert reader.find_attempt("demo:9.0.0:stray") is None


def test_counts_are_those_of_attempts_that_are_not_superseded(reader: RunReader) -> None:
    assert dict(reader.count_fates()) == {"trained": 6, "dropped": 6}
    assert dict(reader.count_statuses()) == {Status.OUT_OF_TURNS: 8}
    assert reader.count_attempts(most=3) == 3


def test_a_summary_counts_turns_tokens_calls_and_errors(reader: RunReader) -> None:
    [first] = reader.list_attempts(AttemptFilter(id_prefix="0.0.0"))
    assert (first.status, first.fate, first.step, first.credit) == (Status.OUT_OF_TURNS, "trained", 1, 2.5)
    assert (first.turns, first.action_tokens, first.calls, first.call_errors) == (3, 6, 3, 0)
    assert (first.split, first.version, first.seconds, first.has_token_records) == ("train", 0, 1.5, True)
    assert first.reward is None  # the reward of the judge is None


def test_the_reward_of_a_summary_is_the_weighted_sum_of_all_rewards(folder: Path, make: object) -> None:
    trajectory = make()  # type: ignore[operator]
    with closing(create_run(folder, {"reward_weights": {"judge": 0, "found": 10}})) as writer:
        record_all(writer, [AttemptStarted(trajectory.attempt, "train", 0), AttemptFinished(trajectory)])
    with closing(RunReader(folder)) as reader:
        [summary] = reader.list_attempts()
        assert reader.list_attempts(AttemptFilter(min_reward=21)) == ()
        assert reader.list_attempts(AttemptFilter(min_reward=20)) == (summary,)
    # exact_match 1, steps 3 * 0.5, format 3 * -0.5, and two calls with found 10 * 1 and cost -0.1 / 3
    assert summary.reward == pytest.approx(21 - 0.2 / 3)


def test_the_siblings_of_an_attempt_are_its_group(reader: RunReader) -> None:
    [last] = reader.list_attempts(AttemptFilter(id_prefix="2.1"))
    assert [sibling.attempt.sort_key for sibling in reader.siblings(last.attempt)] == [(2, 0, 0), (2, 1, 0), (2, 2, 0)]


def test_token_records_are_read_back_exactly(reader: RunReader) -> None:
    [summary] = reader.list_attempts(AttemptFilter(id_prefix="3.0"))
    records = reader.token_records(summary.attempt)
    assert [record.turn for record in records] == [0, 1, 2]
    assert math.isnan(records[2].logprobs[0]) and records[2].logprobs[1] == -0.25
    assert (records[0].advantages, records[0].loss_weights, records[0].values) == ((4 / 3, 0.5), (0.125, 0.0), ())
    [other] = reader.list_attempts(AttemptFilter(id_prefix="3.1"))
    assert reader.token_records(other.attempt) == () and not other.has_token_records


def test_token_records_after_the_checkpoint_are_superseded_with_their_attempt(reader: RunReader) -> None:
    [summary] = reader.list_attempts(AttemptFilter(id_prefix="2.0"))
    assert len(reader.token_records(summary.attempt)) == 3


def test_a_curve_has_the_values_of_one_metric_by_step(reader: RunReader) -> None:
    assert reader.curve("loss") == {step: step / 7 for step in (1, 2, 3, 4)}
    assert reader.curve("nothing") == {}
    assert reader.metric_names() == ("loss", "seconds")


def test_recent_events_and_segments_have_their_times(reader: RunReader) -> None:
    [event] = reader.recent_events(1)
    assert (event.segment, event.event.kind) == (2, "completed")
    first, second = reader.segments()
    assert (first.step, second.step) == (0, 2) and first.time <= second.time <= event.time

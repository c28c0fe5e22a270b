"""Recorded events are on the disk when ``record`` returns, exactly, whatever happens next."""

import asyncio
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from agent_r1.core.events import (
    AttemptFate,
    AttemptFinished,
    AttemptStarted,
    Event,
    LogEvent,
    PolicyPublished,
    StepMetrics,
    StepTimings,
)
from agent_r1.core.inference import PolicyVersion
from agent_r1.core.trajectory import Status, Trajectory
from agent_r1.store.folder import create_run
from agent_r1.store.reader import RunReader
from agent_r1.store.writer import RunWriteError, RunWriter

Make = Callable[..., Trajectory]


def started(trajectory: Trajectory, split: str = "train") -> AttemptStarted:
    return AttemptStarted(trajectory.attempt, split, 7)


def record(folder: Path, *events: Event) -> None:
    with closing(create_run(folder, {})) as writer:
        asyncio.run(writer.record(*events))


def test_every_event_comes_back_as_it_was(folder: Path, make: Make) -> None:
    first, second = make(0), make(1, turns=0)
    not_measured = replace(first.turns[1], timing=None)
    first = replace(first, start_time=1e9, wait_seconds=0.5, turns=(first.turns[0], not_measured, first.turns[2]))
    fates = [
        AttemptFate(first.attempt, "trained", 1, credit=0.1 + 0.2),
        AttemptFate(second.attempt, "dropped", 1, "every reward is equal"),
    ]
    metrics = [StepMetrics(1, {"loss": 0.25, "reward": -1.5}), StepMetrics(2, {"loss": math.inf})]
    events = [LogEvent("warning", "slow \ud800 tool"), LogEvent("done", "")]
    starts = [started(first), started(second, "validation")]
    versions = [PolicyVersion(0, 0, "ab"), PolicyVersion(1, 2, "cd"), PolicyVersion(2, 3)]
    record(
        folder,
        *starts,
        AttemptFinished(first),
        AttemptFinished(second),
        *fates,
        *map(PolicyPublished, versions),
        *metrics,
        StepTimings(2, {"s": 1.5}),
        *events,
    )
    with closing(RunReader(folder)) as reader:
        assert list(reader.attempts()) == starts
        assert list(reader.trajectories()) == [first, second]
        assert list(reader.trajectories("validation")) == [second]
        assert (found := reader.trajectory(first.attempt)) == first
        assert (found.start_time, found.wait_seconds) == (first.start_time, first.wait_seconds)
        assert [turn.timing for turn in found.turns] == [first.turns[0].timing, None, first.turns[2].timing]
        assert reader.trajectory(replace(first.attempt, retry=1)) is None
        assert list(reader.fates()) == fates
        assert list(reader.versions()) == versions
        assert list(reader.reproducible_metrics()) == metrics
        assert list(reader.metrics()) == [metrics[0], StepMetrics(2, {"loss": math.inf, "s": 1.5})]
        assert list(reader.events()) == [LogEvent("warning", "slow \\ud800 tool"), LogEvent("done", "")]


reward_values = st.none() | st.floats(allow_nan=False) | st.lists(st.floats(allow_nan=False)).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.dictionaries(names, reward_values),
    process=st.dictionaries(names, st.floats(allow_nan=False)),
    calls=st.lists(st.dictionaries(names, st.floats(allow_nan=False)), max_size=3).map(tuple),
    ends=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    logprobs=st.tuples(st.floats(max_value=0, allow_nan=False), st.floats(max_value=0, allow_nan=False)),
    status=st.sampled_from(Status),
    reason=st.none() | names,
)
def test_any_trajectory_comes_back_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    rewards,
    process,
    calls,
    ends,
    logprobs,
    status,
    reason,
) -> None:
    trajectory = request.getfixturevalue("make")()
    first = replace(trajectory.turns[0], logprobs=logprobs, rewards=process, call_rewards=calls, call_ends=ends)
    turns = (first, *trajectory.turns[1:])
    trajectory = replace(trajectory, turns=turns, rewards=rewards, status=status, reason=reason)
    folder = tmp_path_factory.mktemp("any") / "demo"
    record(folder, started(trajectory), AttemptFinished(trajectory))
    with closing(RunReader(folder)) as reader:
        assert list(reader.trajectories()) == [trajectory]


def test_nan_is_not_lost_as_null(folder: Path, make: Make) -> None:
    trajectory = replace(make(), rewards={"judge": math.nan})
    record(folder, started(trajectory), AttemptFinished(trajectory), StepMetrics(1, {"ratio": math.nan}))
    with closing(RunReader(folder)) as reader:
        [back], [metrics] = reader.trajectories(), reader.metrics()
    assert math.isnan(back.rewards["judge"]) and math.isnan(metrics.values["ratio"])


def test_a_run_can_be_read_while_it_is_written(folder: Path, make: Make) -> None:
    with closing(create_run(folder, {})) as writer, closing(RunReader(folder)) as reader:
        assert list(reader.attempts()) == []
        asyncio.run(writer.record(started(make())))
        assert list(reader.attempts()) == [started(make())]


CONTRADICTIONS: dict[str, Callable[[Trajectory], list[Event]]] = {
    "finished but never started": lambda t: [AttemptFinished(t)],
    "a fate but never started": lambda t: [AttemptFate(t.attempt, "trained", 1)],
    "started twice": lambda t: [started(t), started(t)],
    "finished twice": lambda t: [started(t), AttemptFinished(t), AttemptFinished(t)],
    "two fates": lambda t: [
        started(t),
        AttemptFate(t.attempt, "trained", 1),
        AttemptFate(t.attempt, "dropped", 1, "late"),
    ],
    "a metric recorded twice": lambda t: [StepMetrics(1, {"loss": 0.0}), StepMetrics(1, {"loss": 1.0})],
    "a version published twice": lambda t: [
        PolicyPublished(PolicyVersion(1, 1, "ab")),
        PolicyPublished(PolicyVersion(1, 2, "cd")),
    ],
    "a token id beyond int32": lambda t: [
        started(t),
        AttemptFinished(replace(t, turns=(replace(t.turns[0], new_ids=(2**31,)),))),
    ],
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_events_are_refused_as_a_whole_and_no_others(name: str, folder: Path, make: Make) -> None:
    async def both(writer: RunWriter) -> list[BaseException | None]:
        good, bad = make(0), make(1)
        calls = writer.record(started(good), AttemptFinished(good)), writer.record(*CONTRADICTIONS[name](bad))
        return await asyncio.gather(*calls, return_exceptions=True)

    with closing(create_run(folder, {})) as writer:
        fine, refused = asyncio.run(both(writer))
        asyncio.run(writer.record(LogEvent("after", "still open")))
    assert fine is None and isinstance(refused, RunWriteError)
    with closing(RunReader(folder)) as reader:
        assert list(reader.trajectories()) == [make(0)]
        assert list(reader.attempts()) == [started(make(0))]
        assert [*reader.fates(), *reader.metrics()] == []
        assert list(reader.events()) == [LogEvent("after", "still open")]


def test_events_that_wait_at_the_same_time_share_a_transaction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    commit = RunWriter._commit
    monkeypatch.setattr(RunWriter, "_commit", lambda self, batch: batches.append(len(batch)) or commit(self, batch))

    async def many(writer: RunWriter) -> None:
        await asyncio.gather(*(writer.record(LogEvent("tick", str(index))) for index in range(200)))

    with closing(create_run(folder, {})) as writer:
        asyncio.run(many(writer))
    with closing(RunReader(folder)) as reader:
        assert [event.detail for event in reader.events()] == [str(index) for index in range(200)]
    assert sum(batches) == 200 and len(batches) < 50


def test_events_of_a_cancelled_caller_are_written(folder: Path) -> None:
    async def give_up(writer: RunWriter) -> None:
        call = asyncio.create_task(writer.record(LogEvent("last", "words")))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await writer.record(LogEvent("and", "on"))

    with closing(create_run(folder, {})) as writer:
        asyncio.run(give_up(writer))
    with closing(RunReader(folder)) as reader:
        assert list(reader.events()) == [LogEvent("last", "words"), LogEvent("and", "on")]


WRITER = """
import asyncio, sys
from pathlib import Path
from agent_r1.core.trajectory import AttemptId
from agent_r1.core.events import AttemptStarted
from agent_r1.core.inference import PolicyVersion
from agent_r1.store.folder import create_run

async def write(writer):
    for group in range(10**6):
        await writer.record(AttemptStarted(AttemptId("demo", "task", group, 0), "train", 0))
        print(group, flush=True)

asyncio.run(write(create_run(Path(sys.argv[1]), {})))
"""


@pytest.mark.parametrize("acknowledged", [1, 3, 20, 90])
def test_a_killed_run_keeps_all_acknowledged_events(acknowledged: int, folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, encoding="utf-8"
    ) as writer:
        assert writer.stdout is not None
        for _ in range(acknowledged):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        last = max([last, *map(int, writer.stdout.read().split())])
    with closing(RunReader(folder)) as reader:
        groups = [event.attempt.group_id for event in reader.attempts()]
    assert groups[: last + 1] == list(range(last + 1))


FULL_DISK = """
import asyncio, resource, signal, sys
from pathlib import Path
from agent_r1.core.events import LogEvent
from agent_r1.core.inference import PolicyVersion
from agent_r1.store.folder import create_run
from agent_r1.store.writer import RunWriteError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = create_run(Path(sys.argv[1]), {})
asyncio.run(writer.record(LogEvent("kept", "before")))
size = Path(sys.argv[1], "run.db-wal").stat().st_size
endless = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit, detail in (((size, endless[1]), "x" * 100_000), (endless, "there is room again")):
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    try:
        asyncio.run(writer.record(LogEvent("lost", detail)))
    except RunWriteError as error:
        print(error)
writer.close()
"""


def test_a_failing_disk_stops_recording_and_keeps_acknowledged_events(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder)], capture_output=True, encoding="utf-8", check=True
    )
    assert run.stdout.count("the run can no longer be written") == 2
    with closing(RunReader(folder)) as reader:
        assert list(reader.events()) == [LogEvent("kept", "before")]


@pytest.mark.parametrize(
    "loss", [lambda folder: shutil.rmtree(folder), lambda folder: folder.rename(f"{folder}-moved")]
)
def test_a_run_whose_folder_is_gone_is_not_written_any_more(loss: Callable[[Path], object], folder: Path) -> None:
    with closing(create_run(folder, {})) as writer:
        asyncio.run(writer.record(LogEvent("before", "")))
        loss(folder)
        with pytest.raises(RunWriteError, match="was deleted or moved while the run was written"):
            asyncio.run(writer.record(LogEvent("after", "")))


def test_a_run_whose_database_was_replaced_is_not_written_any_more(folder: Path) -> None:
    with closing(create_run(folder, {})) as writer:
        shutil.copy(folder / "run.db", folder / "copy.db")
        (folder / "copy.db").replace(folder / "run.db")
        with pytest.raises(RunWriteError, match="was deleted or moved"):
            asyncio.run(writer.record(LogEvent("after", "")))

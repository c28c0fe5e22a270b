"""What was acknowledged is on the disk, exactly, whatever happens next."""

import asyncio
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.core.attempt_id import AttemptId
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
from agent_r1.core.trajectory import Status, Trajectory
from agent_r1.store import Ledger, LedgerError, RunReader, create_run

Live = Callable[..., Trajectory]


def dispatched(trajectory: Trajectory, split: str = "train") -> AttemptStarted:
    return AttemptStarted(trajectory.attempt, split, 7)


def record(folder: Path, *events: Event) -> None:
    with closing(create_run(folder, {})) as ledger:
        asyncio.run(ledger.record(*events))


def test_every_event_comes_back_as_it_was(folder: Path, live: Live) -> None:
    first, second = live(0), live(1, turns=0)
    fates = [
        AttemptFate(first.attempt, "trained", 1, credit=0.1 + 0.2),
        AttemptFate(second.attempt, "dropped", 1, "every reward is equal"),
    ]
    measured = [StepMetrics(1, {"loss": 0.25, "reward": -1.5}), StepMetrics(2, {"loss": math.inf})]
    happened = [LogEvent("warning", "slow \ud800 tool"), LogEvent("done", "")]
    starts = [dispatched(first), dispatched(second, "validation")]
    made = [PolicyPublished(0, 0, "ab"), PolicyPublished(1, 2, "cd")]
    record(
        folder,
        *starts,
        AttemptFinished(first),
        AttemptFinished(second),
        *fates,
        *made,
        *measured,
        StepTimings(2, {"s": 1.5}),
        *happened,
    )
    with closing(RunReader(folder)) as reader:
        assert list(reader.dispatched()) == starts
        assert list(reader.trajectories()) == [first, second]
        assert list(reader.trajectories("validation")) == [second]
        assert reader.trajectory(first.attempt) == first
        assert reader.trajectory(replace(first.attempt, retry=1)) is None
        assert list(reader.fates()) == fates
        assert list(reader.versions()) == made
        assert list(reader.exact_metrics()) == measured
        assert list(reader.metrics()) == [measured[0], StepMetrics(2, {"loss": math.inf, "s": 1.5})]
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
    lived = request.getfixturevalue("live")()
    first = replace(lived.turns[0], logprobs=logprobs, rewards=process, call_rewards=calls, call_ends=ends)
    turns = (first, *lived.turns[1:])
    lived = replace(lived, turns=turns, rewards=rewards, status=status, reason=reason)
    folder = tmp_path_factory.mktemp("any") / "demo"
    record(folder, dispatched(lived), AttemptFinished(lived))
    with closing(RunReader(folder)) as reader:
        assert list(reader.trajectories()) == [lived]


def test_nan_is_not_lost_as_null(folder: Path, live: Live) -> None:
    lived = replace(live(), rewards={"judge": math.nan})
    record(folder, dispatched(lived), AttemptFinished(lived), StepMetrics(1, {"ratio": math.nan}))
    with closing(RunReader(folder)) as reader:
        [back], [measured] = reader.trajectories(), reader.metrics()
    assert math.isnan(back.rewards["judge"]) and math.isnan(measured.values["ratio"])


def test_a_run_can_be_read_while_it_is_written(folder: Path, live: Live) -> None:
    with closing(create_run(folder, {})) as ledger, closing(RunReader(folder)) as reader:
        assert list(reader.dispatched()) == []
        asyncio.run(ledger.record(dispatched(live())))
        assert list(reader.dispatched()) == [dispatched(live())]


CONTRADICTIONS: dict[str, Callable[[Trajectory], list[Event]]] = {
    "finished but never dispatched": lambda t: [AttemptFinished(t)],
    "a fate but never dispatched": lambda t: [AttemptFate(t.attempt, "trained", 1)],
    "dispatched twice": lambda t: [dispatched(t), dispatched(t)],
    "finished twice": lambda t: [dispatched(t), AttemptFinished(t), AttemptFinished(t)],
    "two fates": lambda t: [
        dispatched(t),
        AttemptFate(t.attempt, "trained", 1),
        AttemptFate(t.attempt, "dropped", 1, "late"),
    ],
    "a metric measured twice": lambda t: [StepMetrics(1, {"loss": 0.0}), StepMetrics(1, {"loss": 1.0})],
    "a version published twice": lambda t: [PolicyPublished(1, 1, "ab"), PolicyPublished(1, 2, "cd")],
    "a token id beyond int32": lambda t: [
        dispatched(t),
        AttemptFinished(replace(t, turns=(replace(t.turns[0], new_ids=(2**31,)),))),
    ],
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_whole_and_alone(name: str, folder: Path, live: Live) -> None:
    async def both(ledger: Ledger) -> list[BaseException | None]:
        good, bad = live(0), live(1)
        calls = ledger.record(dispatched(good), AttemptFinished(good)), ledger.record(*CONTRADICTIONS[name](bad))
        return await asyncio.gather(*calls, return_exceptions=True)

    with closing(create_run(folder, {})) as ledger:
        fine, refused = asyncio.run(both(ledger))
        asyncio.run(ledger.record(LogEvent("after", "still open")))
    assert fine is None and isinstance(refused, LedgerError)
    with closing(RunReader(folder)) as reader:
        assert list(reader.trajectories()) == [live(0)]
        assert list(reader.dispatched()) == [dispatched(live(0))]
        assert [*reader.fates(), *reader.metrics()] == []
        assert list(reader.events()) == [LogEvent("after", "still open")]


def test_events_that_wait_together_share_a_transaction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    commit = Ledger._commit
    monkeypatch.setattr(Ledger, "_commit", lambda self, batch: batches.append(len(batch)) or commit(self, batch))

    async def many(ledger: Ledger) -> None:
        await asyncio.gather(*(ledger.record(LogEvent("tick", str(index))) for index in range(200)))

    with closing(create_run(folder, {})) as ledger:
        asyncio.run(many(ledger))
    with closing(RunReader(folder)) as reader:
        assert [event.detail for event in reader.events()] == [str(index) for index in range(200)]
    assert sum(batches) == 200 and len(batches) < 50


def test_events_of_a_cancelled_caller_are_written(folder: Path) -> None:
    async def give_up(ledger: Ledger) -> None:
        call = asyncio.create_task(ledger.record(LogEvent("last", "words")))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await ledger.record(LogEvent("and", "on"))

    with closing(create_run(folder, {})) as ledger:
        asyncio.run(give_up(ledger))
    with closing(RunReader(folder)) as reader:
        assert list(reader.events()) == [LogEvent("last", "words"), LogEvent("and", "on")]


WRITER = """
import asyncio, sys
from pathlib import Path
from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.events import AttemptStarted
from agent_r1.store import create_run

async def write(ledger):
    for group in range(10**6):
        await ledger.record(AttemptStarted(AttemptId("demo", "task", group, 0), "train", 0))
        print(group, flush=True)

asyncio.run(write(create_run(Path(sys.argv[1]), {})))
"""


@pytest.mark.parametrize("acknowledged", [1, 3, 20, 90])
def test_a_killed_run_holds_all_it_acknowledged(acknowledged: int, folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(acknowledged):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        last = max([last, *map(int, writer.stdout.read().split())])
    with closing(RunReader(folder)) as reader:
        groups = [event.attempt.group for event in reader.dispatched()]
    assert groups[: last + 1] == list(range(last + 1))


FULL_DISK = """
import asyncio, resource, signal, sys
from pathlib import Path
from agent_r1.core.events import LogEvent
from agent_r1.store import LedgerError, create_run

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = create_run(Path(sys.argv[1]), {})
asyncio.run(ledger.record(LogEvent("kept", "before")))
size = Path(sys.argv[1], "run.db-wal").stat().st_size
endless = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit, detail in (((size, endless[1]), "x" * 100_000), (endless, "there is room again")):
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    try:
        asyncio.run(ledger.record(LogEvent("lost", detail)))
    except LedgerError as error:
        print(error)
ledger.close()
"""


def test_a_failing_disk_ends_the_ledger_and_keeps_what_was_acknowledged(folder: Path) -> None:
    run = subprocess.run([sys.executable, "-c", FULL_DISK, str(folder)], capture_output=True, text=True, check=True)
    assert run.stdout.count("the run can no longer be written") == 2
    with closing(RunReader(folder)) as reader:
        assert list(reader.events()) == [LogEvent("kept", "before")]


def test_attempts_of_one_run_differ_by_any_field(folder: Path) -> None:
    base = AttemptId("demo", "task", 0, 0)
    variants = [base, *(replace(base, **{name: 1}) for name in ("group", "member", "retry")), replace(base, task="t")]
    record(folder, *(AttemptStarted(attempt, "train", 0) for attempt in variants))
    with closing(RunReader(folder)) as reader:
        assert [event.attempt for event in reader.dispatched()] == variants

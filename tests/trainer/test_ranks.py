"""Groups of rank processes: requests, errors, and the end of a rank or of the process that started it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
from forked_ranks import ForkedRank
from preloaded import Program
from trainer import rank_requests

from agent_r1.core.errors import InvalidInput
from agent_r1.trainer import ranks
from agent_r1.trainer.ranks import RankFailed, RankGroup

DRIVER = """
import time
from agent_r1.trainer.ranks import RankGroup
from trainer import rank_requests
group = RankGroup(2, "cpu")
assert group.call(rank_requests.sum_of_ranks) == [1.0, 1.0]
print(*group.pids, flush=True)
time.sleep(600)
"""


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup[None]]:
    monkeypatch.setattr(ranks, "start_process", ForkedRank)
    with closing(RankGroup[None](2, "cpu")) as started:
        yield started


@dataclass(frozen=True)
class EndedProcess:
    """A process that has ended with an exit code."""

    code: int
    pid: int = 0

    def kill(self) -> None:
        """It has ended."""

    def wait(self, timeout: float | None = None) -> int:
        return self.code


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pids: list[int]) -> None:
    end = time.monotonic() + 120
    while any(map(is_running, pids)):
        assert time.monotonic() < end, "a rank still runs"
        time.sleep(0.05)


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses (hexadecimal) on which the sockets of a process listen."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    sockets = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    tables = [Path(f"/proc/{pid}/net/{file}").read_text("utf-8").splitlines() for file in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table[1:]]
    return {row[1].partition(":")[0] for row in rows if len(row) > 9 and row[9] in sockets and row[3] == "0A"}


def test_ranks_answer_in_their_order_and_listen_on_loopback_only(group: RankGroup[None]) -> None:
    assert group.call(rank_requests.rank) == [0, 1]
    assert group.call(rank_requests.sum_of_ranks) == [1.0, 1.0]
    assert set().union(*map(listening_addresses, group.pids)) == {"0100007F"}  # 127.0.0.1


def test_a_killed_rank_is_named_and_ends_the_others(group: RankGroup[None]) -> None:
    pids = group.pids
    with pytest.raises(RankFailed, match=rf"rank 1 .* \(process {pids[1]}\) was killed by SIGKILL; .* --resume"):
        group.call(rank_requests.kill_last_rank)
    wait_until_ended(pids)
    with pytest.raises(RankFailed, match="have ended"):
        group.call(rank_requests.rank)


def test_an_abort_that_is_noticed_first_does_not_hide_the_kill_that_caused_it() -> None:
    endings = ranks._Endings()
    for rank, code in enumerate((-signal.SIGABRT, -signal.SIGKILL)):
        endings.watch(rank, EndedProcess(code))
        while rank not in endings._codes:
            time.sleep(0.001)
    assert list(endings._codes.values()) == [-signal.SIGABRT, -signal.SIGKILL]
    assert endings.cause() == (1, -signal.SIGKILL)


def test_ctrl_c_in_a_terminal_does_not_reach_ranks() -> None:
    # A terminal sends the signal to its foreground process group; a rank that starts would print a traceback.
    here, there = Pipe()
    process = ranks.start_process(there)
    try:
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    finally:
        process.kill()
        process.wait()
        here.close()
        there.close()


def test_an_error_of_one_rank_ends_all_and_is_shown(group: RankGroup[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.1)
    with pytest.raises(RankFailed, match="rank 1 of the trainer failed: RuntimeError: no such tensor") as raised:
        group.call(rank_requests.fail_on_last_rank)
    assert "fail_on_last_rank" in str(raised.value.__cause__)  # the traceback of the rank
    wait_until_ended(group.pids)


def test_an_error_of_the_input_keeps_its_type(group: RankGroup[None]) -> None:
    with pytest.raises(InvalidInput, match="knob: got 3; turn it"):
        group.call(rank_requests.refuse)


def test_ranks_end_when_their_driver_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    driver = Program(tmp_path, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{DRIVER}")
    while not (printed := driver.stdout.exists() and driver.stdout.read_text("utf-8")):
        assert driver.process.is_alive(), driver.stderr.read_text("utf-8")
        time.sleep(0.05)
    pids = [int(pid) for pid in printed.split()]
    assert all(map(is_running, pids))
    driver.process.kill()
    wait_until_ended(pids)
    assert driver.stderr.read_text("utf-8") == ""

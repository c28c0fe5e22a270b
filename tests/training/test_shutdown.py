"""A run that is asked to stop saves its last step and leaves; one that is asked again leaves at once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from resuming import Whole, config_of, resume

from agent_r1.core.errors import Interrupted
from agent_r1.core.taskset import TaskSet
from agent_r1.store import RunReader
from agent_r1.store.manifest import checkpoints, step_of
from agent_r1.store.verify import verify
from agent_r1.training import run
from agent_r1.training.report import Silence, StepReport
from agent_r1.training.shutdown import HEEDED, Halt, Halting, heeding


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """What a shell starts in the background has interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Telling(Silence):
    """Progress that signals this process after a step."""

    def __init__(self, step: int, number: int) -> None:
        self._step, self._number = step, number

    def stepped(self, report: StepReport) -> None:
        if report.step == self._step:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize("number", HEEDED)
@pytest.mark.parametrize("every", [3, 1])
def test_asked_to_stop_a_run_saves_its_last_step(
    number: signal.Signals, every: int, micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    folder, settings = tmp_path / "run", {"steps": 5, "checkpoint_every": every}
    with pytest.raises(Interrupted, match=f"^stopped by {number.name}$") as stopped:
        run.train(config_of(micro, folder, settings), micro, Telling(2, number))
    assert (stopped.value.number, stopped.value.folder) == (number, folder)
    assert step_of(checkpoints(folder)[0]) == 2
    assert verify(folder).violations == () and verify(folder).steps == 2
    assert resume(micro, folder) == whole(**settings).made


def test_without_checkpoints_none_is_made_to_stop(micro: TaskSet, tmp_path: Path) -> None:
    config = config_of(micro, tmp_path / "run", {"steps": 3, "checkpoint_every": 0})
    with pytest.raises(Interrupted, match="with checkpoint_every 0, so that it will begin anew"):
        run.train(config, micro, Telling(1, signal.SIGTERM))
    assert checkpoints(tmp_path / "run") == []


def test_after_its_last_step_a_run_is_compared_when_it_goes_on(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        run.train(config_of(micro, folder, {"steps": 3}), micro, Telling(3, signal.SIGTERM))
    with closing(RunReader(folder)) as reader:
        assert not reader.completed()
    assert (folder / "model").is_dir() and resume(micro, folder) == whole(steps=3).made


def test_a_step_that_became_the_last_one_is_validated(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    folder, settings = tmp_path / "run", {"evaluate_every": 3, "evaluate_n": 2}
    with pytest.raises(Interrupted):
        run.train(config_of(micro, folder, {"steps": 5, **settings}), micro, Telling(2, signal.SIGTERM))
    assert resume(micro, folder, steps=2) == whole(steps=2, **settings).made
    position = json.loads((checkpoints(folder)[0] / "position.json").read_text())
    assert (position["step"], position["validated"]) == (2, 2) and position["best"]["step"] == 2
    assert verify(folder).holds


def test_what_was_there_hears_signals_again_afterwards(micro: TaskSet, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in HEEDED]
    with pytest.raises(Interrupted):
        run.train(config_of(micro, tmp_path / "run", {"steps": 2}), micro, Telling(1, signal.SIGINT))
    assert [signal.getsignal(number) for number in HEEDED] == before


def test_a_section_is_left_at_once_and_what_follows_is_not_begun() -> None:
    async def working() -> list[str]:
        said: list[str] = []
        with heeding(Silence()) as halt:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            with pytest.raises(Halting), halt.section():
                await asyncio.sleep(60)
            with pytest.raises(Halting), halt.section():
                said.append("begun")
            task = asyncio.current_task()
            assert task is not None and task.cancelling() == 0  # else a later timeout would take it for its own
        return said

    assert asyncio.run(working()) == []


def test_outside_of_a_section_nothing_is_cut_short() -> None:
    async def working() -> bool:
        with heeding(Silence()) as halt:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            return halt.signal == signal.SIGTERM

    assert asyncio.run(working())


def test_a_cancellation_by_others_stays_one() -> None:
    async def sleeping(halt: Halt) -> None:
        with halt.section():
            await asyncio.sleep(60)

    async def working() -> None:
        task = asyncio.create_task(sleeping(Halt(Silence())))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(working())


def test_asked_again_it_leaves_at_once() -> None:
    async def stuck() -> None:
        with heeding(Silence()):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(stuck())


TWICE = """
import asyncio, os, signal, time
from agent_r1.training.shutdown import heeding
from agent_r1.training.report import Silence

async def stuck():
    with heeding(Silence()):
        os.kill(os.getpid(), signal.SIGTERM)
        print("heard", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

asyncio.run(stuck())
"""


def test_terminated_twice_the_process_dies_of_the_signal() -> None:
    ended = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, b"heard\n"), ended.stderr


def test_another_thread_is_sent_no_signals(micro: TaskSet, tmp_path: Path) -> None:
    config = config_of(micro, tmp_path / "run", {"steps": 1})
    thread = threading.Thread(target=run.train, args=(config, micro, Silence()))
    thread.start()
    thread.join()
    assert verify(tmp_path / "run").steps == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_says_how_to_go_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    command = [sys.executable, "-m", "agent_r1.cli", "train", "--run", str(folder), "--steps", "500"]
    child = subprocess.Popen([*command, "--groups_per_step", "2", "--evaluate_every", "0"], stderr=subprocess.PIPE)
    assert child.stderr is not None
    heard = b""
    while b"step 2/500" not in heard:
        heard += (line := child.stderr.readline())
        assert line, heard
    child.send_signal(number)
    heard += child.communicate(timeout=60)[1]
    said = heard.decode().splitlines()[-2:]
    assert said[0].startswith("stopping; ") and said[0].endswith("once more to leave at once")
    assert said[1] == f"agent-r1: stopped by {number.name}; to go on: agent-r1 train --run '{folder}' --resume"
    assert child.returncode == code and verify(folder).holds and checkpoints(folder) != []

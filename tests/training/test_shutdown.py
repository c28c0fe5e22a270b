"""After one signal a run saves its last step and stops; after a second one it stops at once."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from preloaded import Program, run_python
from resuming import Whole, config_of, resume

from agent_r1.core.errors import Interrupted
from agent_r1.core.taskset import TaskSet
from agent_r1.store.manifest import checkpoint_step, list_checkpoints
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.training import run
from agent_r1.training.progress import SilentProgress, StepReport
from agent_r1.training.shutdown import GracefulShutdown, ShutdownRequested, handle_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Signalling(SilentProgress):
    """Progress that sends this process a signal after a step."""

    def __init__(self, step: int, number: int) -> None:
        self._step, self._number = step, number

    def on_step(self, report: StepReport) -> None:
        if report.step == self._step:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize(("number", "every"), [(signal.SIGINT, 3), (signal.SIGTERM, 1)])
def test_a_signalled_run_saves_its_last_step(
    number: signal.Signals, every: int, micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    folder, settings = tmp_path / "run", {"steps": 5, "checkpoint_every": every}
    with pytest.raises(Interrupted, match=f"^stopped by {number.name}$") as stopped:
        run.train(config_of(micro, folder, settings), micro, Signalling(2, number))
    assert (stopped.value.number, stopped.value.folder) == (number, folder)
    assert checkpoint_step(list_checkpoints(folder)[0]) == 2
    assert verify(folder).violations == () and verify(folder).steps == 2
    assert resume(micro, folder) == whole(**settings).result


def test_a_run_stopped_after_its_last_step_is_evaluated_when_resumed(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        run.train(config_of(micro, folder, {"steps": 3}), micro, Signalling(3, signal.SIGTERM))
    with closing(RunReader(folder)) as reader:
        assert not reader.is_complete()
    assert (folder / "model").is_dir() and resume(micro, folder) == whole(steps=3).result


def test_a_step_that_became_the_last_is_validated(micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", {"evaluate_every": 3, "evaluate_n": 2}
    with pytest.raises(Interrupted):
        run.train(config_of(micro, folder, {"steps": 5, **settings}), micro, Signalling(2, signal.SIGTERM))
    # The digests are equal only if no attempt at a third step finished before the signal: such attempts are dropped.
    assert resume(micro, folder, steps=2).model == whole(steps=2, **settings).result.model
    progress = json.loads((list_checkpoints(folder)[0] / "progress.json").read_text("utf-8"))
    assert (progress["step"], progress["validated"]) == (2, 2) and progress["best"]["step"] == 2
    assert verify(folder).is_valid


def test_the_previous_signal_handlers_are_restored(micro: TaskSet, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(Interrupted):
        run.train(config_of(micro, tmp_path / "run", {"steps": 2}), micro, Signalling(1, signal.SIGINT))
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_an_interruptible_block_is_left_at_once_and_no_other_is_entered() -> None:
    async def working() -> list[str]:
        entered: list[str] = []
        with handle_signals(SilentProgress()) as shutdown:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            with pytest.raises(ShutdownRequested), shutdown.interruptible():
                await asyncio.sleep(60)
            with pytest.raises(ShutdownRequested), shutdown.interruptible():
                entered.append("begun")
            task = asyncio.current_task()
            assert task is not None and task.cancelling() == 0  # otherwise a later timeout would mistake it for its own
        return entered

    assert asyncio.run(working()) == []


def test_nothing_outside_an_interruptible_block_is_cancelled() -> None:
    async def working() -> bool:
        with handle_signals(SilentProgress()) as shutdown:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            return shutdown.signal == signal.SIGTERM

    assert asyncio.run(working())


def test_other_cancellations_stay_cancellations() -> None:
    async def sleeping(shutdown: GracefulShutdown) -> None:
        with shutdown.interruptible():
            await asyncio.sleep(60)

    async def working() -> None:
        task = asyncio.create_task(sleeping(GracefulShutdown(SilentProgress())))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(working())


def test_a_second_interrupt_stops_at_once() -> None:
    async def stuck() -> None:
        with handle_signals(SilentProgress()):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(stuck())


TWICE = """
import asyncio, os, signal, time
from agent_r1.training.shutdown import handle_signals
from agent_r1.training.progress import SilentProgress

async def stuck():
    with handle_signals(SilentProgress()):
        os.kill(os.getpid(), signal.SIGTERM)
        print("handled", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

asyncio.run(stuck())
"""


def test_a_second_sigterm_ends_the_process_by_the_signal() -> None:
    ended = run_python("-c", TWICE)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "handled\n"), ended.stderr


def test_training_in_another_thread_installs_no_handlers(micro: TaskSet, tmp_path: Path) -> None:
    config = config_of(micro, tmp_path / "run", {"steps": 1})
    thread = threading.Thread(target=run.train, args=(config, micro, SilentProgress()))
    thread.start()
    thread.join()
    assert verify(tmp_path / "run").steps == 1


def test_the_command_prints_how_to_resume(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    command = ["-m", "agent_r1.cli", "train", "--run", str(folder), "--steps", "500"]
    child = Program(tmp_path, *command, "--groups_per_step", "2", "--group_size", "4", "--evaluate_every", "0")
    while "step 2/500" not in child.stderr.read_text("utf-8"):
        assert child.process.is_alive(), child.stderr.read_text("utf-8")
        time.sleep(0.05)
    os.kill(child.process.pid, signal.SIGTERM)
    ended = child.wait()
    lines = ended.stderr.splitlines()
    stopping = [line for line in lines if line.startswith("stopping after the update")]
    assert len(stopping) == 1 and stopping[0].endswith("send the signal again to stop at once")
    assert lines[-1] == f"agent-r1: stopped by SIGTERM; to continue: agent-r1 train --run '{folder}' --resume"
    assert ended.returncode == 143 and verify(folder).is_valid and list_checkpoints(folder) != []

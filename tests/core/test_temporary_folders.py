"""Temporary folders: removed after their process was killed, and never while their process is running."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from agent_r1.core.files import TemporaryFolder

PREFIX = "name-"


def hold(parent: Path) -> None:
    """Make a folder with a file, and run until the process is killed."""
    (TemporaryFolder(PREFIX, parent).path / "file").write_text("complete", "utf-8")
    time.sleep(600)


@pytest.fixture
def holder(tmp_path: Path) -> BaseProcess:
    process = get_context("fork").Process(target=hold, args=(tmp_path,), daemon=True)
    process.start()
    while not list(tmp_path.glob("*/file")):
        time.sleep(0.01)
    return process


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(holder: BaseProcess, tmp_path: Path) -> None:
    other = TemporaryFolder("other-", tmp_path)
    kill(holder)
    own = TemporaryFolder(PREFIX, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([own.path, other.path])


def test_the_folder_of_a_running_process_stays_although_no_process_has_the_id_in_its_name(
    holder: BaseProcess, tmp_path: Path
) -> None:
    (folder,) = tmp_path.iterdir()
    foreign = folder.rename(tmp_path / f"{PREFIX}4194305-abc")  # above the largest process id of Linux
    TemporaryFolder(PREFIX, tmp_path)
    assert (foreign / "file").read_text("utf-8") == "complete"
    kill(holder)
    TemporaryFolder(PREFIX, tmp_path)
    assert not foreign.exists()


def test_a_kept_folder_stays(tmp_path: Path) -> None:
    kept = TemporaryFolder(PREFIX, tmp_path)
    (kept.path / "file").write_text("complete", "utf-8")
    kept.keep()
    TemporaryFolder(PREFIX, tmp_path).remove()
    assert [file.name for file in kept.path.iterdir()] == ["file"]


def test_a_removed_folder_is_gone_and_its_process_keeps_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    folder = TemporaryFolder(PREFIX, tmp_path)
    folder.remove()
    folder.remove()
    assert not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == before


def test_folders_that_other_programs_made_stay(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}1-abc").mkdir()
    TemporaryFolder(PREFIX, tmp_path).remove()
    assert (tmp_path / f"{PREFIX}1-abc").is_dir()

"""The cache of folders: made once, whole or absent, and made again if damaged."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from agent_r1.core.files import build_once, is_valid

ORIGIN = {"version": 1, "sha256": "9f86"}


def write(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "weights").write_text("complete", "utf-8")


def never(folder: Path) -> None:
    raise AssertionError("made again")


def start(folder: Path, make: Callable[[Path], None]) -> BaseProcess:
    """Start a process that makes the folder."""
    process = get_context("fork").Process(target=build_once, args=(folder, ORIGIN, make), daemon=True)
    process.start()
    return process


def wait_for(file: Path) -> None:
    for _ in range(6000):
        if file.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(file)


def test_a_folder_is_made_once_for_each_origin(tmp_path: Path) -> None:
    made = build_once(tmp_path / "cache" / "name", ORIGIN, write)
    assert (made / "inner" / "weights").read_text("utf-8") == "complete"
    assert build_once(made, ORIGIN, never) == made
    with pytest.raises(AssertionError, match="made again"):
        build_once(made, {**ORIGIN, "version": 2}, never)
    assert is_valid(made, ORIGIN)  # a folder is not removed before the new one is complete


@pytest.mark.parametrize("damage", ["other bytes", "missing", "one more", "no manifest"])
def test_a_damaged_folder_is_made_again(damage: str, tmp_path: Path) -> None:
    made = build_once(tmp_path / "name", ORIGIN, write)
    weights = made / "inner" / "weights"
    match damage:
        case "other bytes":
            weights.write_text("complets", "utf-8")
        case "missing":
            weights.unlink()
        case "one more":
            (made / "more").touch()
        case "no manifest":
            (made / "manifest.json").unlink()
    assert not is_valid(made, ORIGIN)
    build_once(made, ORIGIN, write)
    assert is_valid(made, ORIGIN) and weights.read_text("utf-8") == "complete" and not (made / "more").exists()


def test_an_error_leaves_no_files(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x", "utf-8")
        raise RuntimeError("the machine is full")

    with pytest.raises(RuntimeError, match="is full"):
        build_once(tmp_path / "name", ORIGIN, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".name.lock"]


def test_a_killed_process_leaves_no_incomplete_folder_and_no_lock(tmp_path: Path) -> None:
    def die(folder: Path) -> None:
        (folder / "half").write_text("x", "utf-8")
        os.kill(os.getpid(), signal.SIGKILL)

    killed = start(tmp_path / "name", die)
    killed.join()
    assert not (tmp_path / "name").exists() and (tmp_path / ".name.part" / "half").exists()
    build_once(tmp_path / "name", ORIGIN, write)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".name.lock", "name"]


def test_a_second_process_waits_and_uses_what_the_first_one_made(tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"

    def slowly(folder: Path) -> None:
        started.touch()
        wait_for(go)
        write(folder)

    def too(folder: Path) -> None:
        (tmp_path / "second").touch()

    first = start(tmp_path / "name", slowly)
    wait_for(started)
    second = start(tmp_path / "name", too)
    second.join(0.2)
    assert second.is_alive()
    go.touch()
    first.join()
    second.join()
    assert (first.exitcode, second.exitcode) == (0, 0)
    assert is_valid(tmp_path / "name", ORIGIN) and not (tmp_path / "second").exists()

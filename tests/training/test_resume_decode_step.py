"""A resumed run keeps the implementation of its decode steps, or records that it cannot."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from resuming import config_of

from agent_r1.config import Layer
from agent_r1.core.events import LogEvent
from agent_r1.core.taskset import TaskSet
from agent_r1.inference import native_decode
from agent_r1.store import RunReader
from agent_r1.training.build import build_runtime
from agent_r1.training.config import TrainConfig
from agent_r1.training.decode_step import decode_step_events
from agent_r1.training.progress import SilentProgress
from agent_r1.training.resume import recorded_decode_step, resolve_resume_config
from agent_r1.training.run import train

pytestmark = pytest.mark.skipif(native_decode.find_compiler() is None, reason="no C++ compiler")


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(native_decode, "find_compiler", lambda: None)


def short_run(micro: TaskSet, folder: Path) -> Path:
    train(config_of(micro, folder, {"steps": 1, "groups_per_step": 1, "group_size": 2}), micro, SilentProgress())
    return folder


def resumed_config(run: Path, **settings: object) -> TrainConfig:
    return resolve_resume_config([Layer("test", {"run": str(run), "steps": 2, **settings})])


def events_of_resuming(run: Path, micro: TaskSet) -> tuple[LogEvent, ...]:
    return decode_step_events(build_runtime(resumed_config(run), micro).engine, run)


def test_a_run_records_the_native_step_and_resuming_it_without_a_compiler_is_inexact(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = short_run(micro, tmp_path / "run")
    with closing(RunReader(run)) as reader:
        native = recorded_decode_step(reader)
    assert native.startswith("native (") and events_of_resuming(run, micro) == ()
    without_compiler(monkeypatch)
    step, inexact = events_of_resuming(run, micro)
    assert step == LogEvent("decode_step", "torch") and inexact.kind == "inexact"
    assert inexact.detail.startswith(f"decode steps are computed by torch instead of {native}: results differ")


def test_a_run_that_began_with_pytorch_continues_with_it_unless_another_step_is_chosen(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        without_compiler(patch)
        run = short_run(micro, tmp_path / "run")
    assert resumed_config(run).engine.decode_step == "torch" and events_of_resuming(run, micro) == ()
    assert resumed_config(run, **{"engine.decode_step": "native"}).engine.decode_step == "native"

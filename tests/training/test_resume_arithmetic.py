"""A resumed run keeps the implementations of its decode steps and updates, or records that it cannot."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from extras import needs_compiler
from resuming import config_of

from agent_r1.config import Layer
from agent_r1.core.events import LogEvent
from agent_r1.core.taskset import TaskSet
from agent_r1.inference import native_decode
from agent_r1.store.reader import RunReader
from agent_r1.trainer import single_process
from agent_r1.training.build import build_runtime
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.resume import recorded_decode_step, resolve_resume_config
from agent_r1.training.run import arithmetic_events, resume, train


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(native_decode, "find_compiler", lambda: None)


def short_run(micro: TaskSet, folder: Path) -> Path:
    train(config_of(micro, folder, {"steps": 1, "groups_per_step": 1, "group_size": 2}), micro, SilentProgress())
    return folder


def resumed_config(run: Path, **settings: object) -> TrainConfig:
    return resolve_resume_config([Layer("test", {"run": str(run), "steps": 2, **settings})])


def events_of_resuming(run: Path, micro: TaskSet) -> list[LogEvent]:
    return arithmetic_events(build_runtime(resumed_config(run), micro), run)


@needs_compiler
def test_a_run_records_the_native_step_and_resuming_it_without_a_compiler_is_inexact(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = short_run(micro, tmp_path / "run")
    with closing(RunReader(run)) as reader:
        native = recorded_decode_step(reader)
    assert native.startswith("native (") and events_of_resuming(run, micro) == []
    without_compiler(monkeypatch)
    step, inexact = events_of_resuming(run, micro)
    assert step == LogEvent("decode_step", "torch") and inexact.kind == "inexact"
    assert inexact.detail.startswith(f"decode steps are computed by torch instead of {native}: results differ")


@needs_compiler
def test_a_run_that_began_with_pytorch_continues_with_it_unless_another_step_is_chosen(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        without_compiler(patch)
        run = short_run(micro, tmp_path / "run")
    assert resumed_config(run).engine.decode_step == "torch" and events_of_resuming(run, micro) == []
    assert resumed_config(run, **{"engine.decode_step": "native"}).engine.decode_step == "native"


# ---- updates


def arithmetic_events_of(run: Path) -> list[LogEvent]:
    with closing(RunReader(run)) as reader:
        return [LogEvent(event.kind, event.detail) for event in reader.events() if event.kind in ("update", "inexact")]


def with_onednn(patch: pytest.MonkeyPatch, used: bool) -> None:
    """Change whether the trainer's models use oneDNN, as on another processor."""
    patch.setattr(single_process, "has_onednn", lambda model: used)


def resume_for_a_step(run: Path, micro: TaskSet, steps: int) -> list[LogEvent]:
    config = resolve_resume_config([Layer("test", {"run": str(run), "steps": steps})])
    resume(config, micro, SilentProgress())
    return arithmetic_events_of(run)


def test_a_run_that_is_resumed_with_other_products_is_inexact(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_onednn(monkeypatch, False)
    run = short_run(micro, tmp_path / "run")
    (first,) = arithmetic_events_of(run)
    assert first.kind == "update" and first.detail.startswith("products by PyTorch and ")
    assert resume_for_a_step(run, micro, 2) == [first]  # the same machine
    with_onednn(monkeypatch, True)
    _, second, inexact = resume_for_a_step(run, micro, 3)
    assert second == LogEvent("update", first.detail.replace("PyTorch", "oneDNN"))
    assert inexact.detail == (
        f"updates have {second.detail} instead of {first.detail}: "
        "results differ in their last bits from those of an uninterrupted run"
    )
    assert resume_for_a_step(run, micro, 4) == [first, second, inexact]  # compared with the last segment

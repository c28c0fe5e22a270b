"""A resumed run continues with the size of the micro-batches that it began with, or records that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from resuming import config_of

from agent_r1.config import Layer
from agent_r1.core.events import LogEvent
from agent_r1.core.taskset import TaskSet
from agent_r1.training.build import build_runtime
from agent_r1.training.checkpoint_manager import INEXACT, restore_run
from agent_r1.training.progress import SilentProgress
from agent_r1.training.resume import resolve_resume_config
from agent_r1.training.run import train


@pytest.fixture(scope="module")
def small_run(micro: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "run"
    train(config_of(micro, folder, {"steps": 1, "groups_per_step": 1, "group_size": 2}), micro, SilentProgress())
    return folder


@pytest.mark.parametrize(("micro_tokens", "is_inexact"), [(4096, False), (8192, False), (100, True)])
def test_resuming_with_smaller_micro_batches_than_before_is_recorded(
    micro_tokens: int, is_inexact: bool, micro: TaskSet, small_run: Path
) -> None:
    given = {"run": str(small_run), "steps": 2, "trainer.micro_tokens": micro_tokens}
    runtime = build_runtime(resolve_resume_config([Layer("test", given)]), micro)
    state = restore_run(small_run, runtime.policy, runtime.updater)
    assert runtime.updater.micro_tokens == min(micro_tokens, 4096)
    found = [event.detail for event in state.events if isinstance(event, LogEvent) and event.kind == INEXACT]
    assert bool(found) == is_inexact and all("100 tokens instead of 4096" in detail for detail in found)

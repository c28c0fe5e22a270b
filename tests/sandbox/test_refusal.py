"""Where the sandbox cannot be had, or does not hold, nothing runs; to go without it has to be said, and is heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox import Limits, Sandbox, SandboxConfig, selftest
from agent_r1.sandbox.isolation import ALL_LAYERS, IsolationLayer
from agent_r1.sandbox.syscalls import filter_program


@pytest.fixture(autouse=True)
def _try_again() -> Iterator[None]:
    """What was found out about this machine is forgotten before each of these tests, and after."""
    selftest._proved.cache_clear()
    yield
    selftest._proved.cache_clear()


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InvalidInput, match=r"sandbox 'bubblewrap': got no program bwrap; install bubblewrap .*none"):
        Sandbox()


def test_without_seccomp_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(selftest, "pyseccomp", None)
    with pytest.raises(InvalidInput, match=r"got no pyseccomp; pip install 'agent-r1\[sandbox\]'"):
        Sandbox()


def test_a_bubblewrap_that_cannot_start_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(selftest, "pyseccomp", object())
    monkeypatch.setattr("agent_r1.sandbox.process.filter_program", bytes)
    with pytest.raises(InvalidInput, match="did not start: bwrap: No permissions to create a namespace") as refusal:
        Sandbox()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("missing", "attack"),
    [(IsolationLayer.FILES, "read_secret"), (IsolationLayer.SYSCALLS, "use_key_ring"), (IsolationLayer.LIMITS, "descriptor_bomb")],
)
def test_a_layer_that_does_not_hold_is_seen(sandbox: Sandbox, missing: IsolationLayer, attack: str) -> None:
    wrong = asyncio.run(selftest.find_holes(ALL_LAYERS - {missing, IsolationLayer.CGROUP}))
    assert wrong is not None and attack in wrong
    assert asyncio.run(selftest.find_holes(ALL_LAYERS - {IsolationLayer.CGROUP})) is None


def test_a_hole_refuses(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.sandbox.syscalls.DENIED", ("reboot",))
    monkeypatch.setattr(
        "agent_r1.sandbox.process.filter_program", filter_program.__wrapped__
    )  # not the one that is kept
    with pytest.raises(InvalidInput, match=r"does not hold here: .*use_key_ring"):
        Sandbox()


def test_the_machine_is_tried_once_per_process(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    async def find_holes(layers: frozenset[IsolationLayer]) -> None:
        tried.append(layers)

    monkeypatch.setattr(selftest, "find_holes", find_holes)
    assert Sandbox().isolation == Sandbox(SandboxConfig(limits=Limits(seconds=1))).isolation
    assert len(tried) == 1


def test_a_sandbox_can_be_made_inside_an_event_loop(sandbox: Sandbox) -> None:
    async def make() -> str:
        return Sandbox().isolation

    assert asyncio.run(make()).startswith("bubblewrap: ")


def test_going_without_is_explicit_loud_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    config = SandboxConfig(level="none")
    with caplog.at_level(logging.WARNING):
        none = Sandbox(config)
    assert "sandbox 'none'" in caplog.text
    assert (none.isolation, none.config.model_dump()["level"]) == ("none: nothing", "none")
    assert asyncio.run(none.run("print(1)")).stdout.text == "1\n"


def test_a_package_folder_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="/nowhere, which is no folder"):
        Sandbox(SandboxConfig(level="none", packages=(Path("/nowhere"),)))

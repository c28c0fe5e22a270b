"""If the sandbox is unavailable or does not hold, nothing runs. Level none is explicit, and logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox import sandbox as probe
from agent_r1.sandbox.config import Limits, SandboxConfig
from agent_r1.sandbox.isolation import ALL_LAYERS, IsolationLayer, filter_program
from agent_r1.sandbox.sandbox import Sandbox


@pytest.fixture(autouse=True)
def _forget_the_machine() -> Iterator[None]:
    probe._verify_machine.cache_clear()
    yield
    probe._verify_machine.cache_clear()


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InvalidInput, match=r"sandbox 'bubblewrap': got no program bwrap; install bubblewrap .*none"):
        Sandbox()


def test_without_seccomp_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(probe, "pyseccomp", None)
    with pytest.raises(InvalidInput, match=r"got no pyseccomp; pip install 'agent-r1\[sandbox\]'"):
        Sandbox()


def test_a_bubblewrap_that_cannot_start_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a namespace' >&2; exit 1\n", "utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probe, "pyseccomp", object())
    monkeypatch.setattr("agent_r1.sandbox.process.filter_program", bytes)
    with pytest.raises(InvalidInput, match="did not start: bwrap: No permissions to create a namespace") as refusal:
        Sandbox()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("layer", sorted(ALL_LAYERS - {IsolationLayer.NETWORK}))
def test_the_probe_finds_each_layer_that_is_missing(sandbox: Sandbox, layer: IsolationLayer) -> None:
    broken = asyncio.run(probe.find_broken_layers(ALL_LAYERS - {layer}))
    assert layer in broken


def test_the_probe_finds_a_missing_network_layer_if_the_system_call_filter_is_missing_too(sandbox: Sandbox) -> None:
    both = {IsolationLayer.NETWORK, IsolationLayer.SYSCALLS}
    assert both <= asyncio.run(probe.find_broken_layers(ALL_LAYERS - both))


def test_the_probe_finds_nothing_if_all_layers_are_in_force(sandbox: Sandbox) -> None:
    assert asyncio.run(probe.find_broken_layers(ALL_LAYERS)) <= {IsolationLayer.CGROUP}


def test_a_layer_that_does_not_hold_refuses(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.sandbox.isolation.DENIED", ("reboot",))
    monkeypatch.setattr("agent_r1.sandbox.process.filter_program", filter_program.__wrapped__)  # not the cached one
    with pytest.raises(InvalidInput, match=r"does not hold here: syscalls; see .*none") as caught:
        Sandbox()
    assert "\n" not in str(caught.value)


def test_a_probe_that_dies_refuses(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SOURCE", "import os\ndef probe(targets): os._exit(3)")
    with pytest.raises(InvalidInput, match=r"got a probe that did not complete: the process ended \(exit status 3\)"):
        Sandbox()


def test_the_machine_is_probed_once_per_process(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    async def find_broken_layers(layers: frozenset[IsolationLayer]) -> frozenset[IsolationLayer]:
        calls.append(layers)
        return frozenset()

    monkeypatch.setattr(probe, "find_broken_layers", find_broken_layers)
    assert Sandbox().isolation == Sandbox(SandboxConfig(limits=Limits(seconds=1))).isolation
    assert len(calls) == 1


def test_level_none_is_explicit_logged_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    config = SandboxConfig(level="none")
    with caplog.at_level(logging.WARNING):
        none = Sandbox(config)
    assert "sandbox 'none'" in caplog.text
    assert (none.isolation, none.config.model_dump()["level"]) == ("none: nothing", "none")
    assert asyncio.run(none.run("print(1)")).stdout.text == "1\n"


def test_a_package_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInput, match="/nowhere, which is no folder"):
        Sandbox(SandboxConfig(level="none", packages=(Path("/nowhere"),)))

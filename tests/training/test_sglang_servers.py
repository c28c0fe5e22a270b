"""`agent-r1 train` on SGLang servers: a whole run on two servers, of which one dies, and the refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from inference.fake_sglang import FakeSglang
from inference.fake_vllm import Fault
from training.server_runs import CONTEXT, OPTIONS, die_after_updates, refuse, two_servers, versions_of

from agent_r1.cli import main


@pytest.fixture
def servers() -> Iterator[list[FakeSglang]]:
    with two_servers(FakeSglang) as started:
        yield started


def sglang(servers: list[FakeSglang]) -> list[str]:
    return ["--engine.backend", "sglang", "--engine.sglang.urls", ",".join(server.url for server in servers)]


def test_a_run_completes_although_a_server_dies_in_the_middle(
    servers: list[FakeSglang], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It dies in the second step. The base model and the trained one are then evaluated on the other server."""
    # four updates: the checks of address and weights, versions 0 and 1
    die_after_updates(servers[0], "/update_weights_from_disk", 4)
    run = tmp_path / "run"
    assert main(["train", *OPTIONS, *sglang(servers), "--run", str(run)]) == 0
    assert set(versions_of(run)) == {0, 1}
    assert servers[0].paths.count("/generate") > 8 and Fault.DIE in servers[0].faults
    assert "trained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.NO_TOKENIZER, "which has no tokenizer; start it without --skip-tokenizer-init"),
        (Fault.OTHER_SHAPES, "answered 400: Worker failed: shapes differ; start it with this model, its vocabulary"),
        (Fault.RAW_LOGPROBS, "differ from the trainer's"),
        (Fault.DIE, "start SGLang 0.5 or newer there"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_in_one_line(
    servers: list[FakeSglang], fault: Fault, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].faults.add(fault)
    line = refuse(sglang(servers), tmp_path, capsys)
    assert servers[1].url in line and message in line


def test_a_server_with_a_shorter_context_is_refused(
    servers: list[FakeSglang], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].context = CONTEXT - 1
    line = refuse(sglang(servers), tmp_path, capsys)
    assert "with a context of 511 tokens; start it with --context-length 512" in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--engine.backend sglang", "give engine.sglang.urls: the addresses of SGLang servers that run"),
        ("--engine.sglang.urls http://a", "only with engine.backend sglang"),
        ("--engine.backend sglang --engine.sglang.urls 127.0.0.1:80", "is not an address"),
        ("--engine.backend sglang --engine.sglang.urls http://a,http://a", "named twice"),
        ("--engine.backend sglang --engine.sglang.urls http://user:secret@a", "without user and password"),
        ("--engine.backend sglang --engine.sglang.urls http://a --engine.replicas 2", "engine.replicas"),
        ("--engine.backend sglang --engine.sglang.urls http://127.0.0.1:9", "ConnectError"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    settings: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refuse(settings.split(), tmp_path, capsys)

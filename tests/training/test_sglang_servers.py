"""`agent-r1 train` on SGLang servers: a whole run on two servers, of which one dies, and the refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from inference.fake_sglang import FakeSglang
from inference.fake_vllm import Fault

from agent_r1.cli import main
from agent_r1.model.load import load_tokenizer
from agent_r1.store import RunReader
from agent_r1.store.verification import verify

CONTEXT = 512
OPTIONS = [
    *("--steps", "2", "--groups_per_step", "2", "--group_size", "4", "--evaluate_every", "0", "--evaluate_n", "2"),
    *("--max_tokens", "20", "--reward_weights.found", "1.0", "--checkpoint_every", "1", "--context", str(CONTEXT)),
    *("--splits", "style-a", "--pass_k", "0", "--quiet"),
]


@pytest.fixture
def servers() -> Iterator[list[FakeSglang]]:
    tokenizer = load_tokenizer("tiny-base")
    with ExitStack() as stack:
        yield [
            stack.enter_context(FakeSglang("tiny-base", CONTEXT, decode=lambda ids: tokenizer.decode(list(ids))))
            for _ in range(2)
        ]


def sglang(servers: list[FakeSglang]) -> list[str]:
    return ["--engine.backend", "sglang", "--engine.sglang.urls", ",".join(server.url for server in servers)]


def test_a_run_completes_although_a_server_dies_in_the_middle(
    servers: list[FakeSglang], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It dies in the second step. The base model and the trained one are then evaluated on the other server."""
    reload = servers[0].reload

    def die_after_second(folder: str) -> object:
        result = reload(folder)
        if servers[0].paths.count("/update_weights_from_disk") == 4:  # the checks of url and weights, versions 0 and 1
            servers[0].faults.add(Fault.DIE)
        return result

    servers[0].reload = die_after_second  # type: ignore[method-assign, assignment]
    run = tmp_path / "run"
    assert main(["train", *OPTIONS, *sglang(servers), "--run", str(run)]) == 0
    assert verify(run).is_valid
    with closing(RunReader(run)) as reader:
        turns = [turn for trajectory in reader.trajectories() for turn in trajectory.turns]
        gaps = [step.values["logprob_gap"] for step in reader.metrics() if "logprob_gap" in step.values]
    assert len(gaps) == 2 and max(gaps) < 1e-3
    assert set(Counter(span.version for turn in turns for span in turn.version_spans)) == {0, 1}
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
    assert main(["train", *OPTIONS, *sglang(servers), "--run", str(tmp_path / "run")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("agent-r1: ")]
    assert len(lines) == 1 and servers[1].url in lines[0] and message in lines[0]
    assert not (tmp_path / "run").exists()


def test_a_server_with_a_shorter_context_is_refused(
    servers: list[FakeSglang], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].context = CONTEXT - 1
    assert main(["train", *OPTIONS, *sglang(servers), "--run", str(tmp_path / "run")]) == 2
    assert "with a context of 511 tokens; start it with --context-length 512" in capsys.readouterr().err


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
    assert main(["train", *OPTIONS, *settings.split(), "--run", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()

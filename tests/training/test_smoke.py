"""``agent-r1 smoke`` passes on a working setup, and names the first check that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from inference.fake_vllm import FakeVllm, Fault

from agent_r1.cli import main
from agent_r1.config import Layer
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.inference import InferenceEngine, PolicyVersion, WeightUpdate
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_tokenizer
from agent_r1.tasksets import build
from agent_r1.training.build import Placement, Runtime, build_runtime
from agent_r1.training.config import RunConfig, TrainConfig, resolve_config
from agent_r1.training.policy import Policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.smoke import SmokeChecks, smoke

CONTEXT = 512
TASKSET = build("tinywiki", None, None, 0)


def config_of(**settings: object) -> TrainConfig:
    values = {"group_size": 2, "max_tokens": 12, "context": CONTEXT, **settings}
    return resolve_config(TrainConfig, [Layer("test", values)], TASKSET)


def test_a_working_setup_passes_and_no_run_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["smoke", "--group_size", "2", "--max_tokens", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["first_failure"] is None and not list(tmp_path.iterdir())
    names = [check["name"] for check in report["checks"]]
    assert names == ["start", "canary", "episodes", "update", "log-probabilities", "publication"]


class Deaf(TorchEngine):
    """An engine that reports new weights and keeps the old ones."""

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return update.version


def deaf(policy: Policy, config: RunConfig) -> InferenceEngine:
    return Deaf(policy.model, policy.context_length, config.engine)


def test_an_engine_that_keeps_old_weights_is_named() -> None:
    *passed, last = smoke(config_of(), TASKSET, SilentProgress(), Placement(engine=deaf))
    assert all(result.passed for result in passed)
    assert (last.name, last.passed) == ("publication", False)
    assert "log-probabilities differ from the trainer's" in last.detail


@dataclass
class Setup:
    """A runtime on two servers, and an event loop in which its checks run."""

    runtime: Runtime
    servers: Sequence[FakeVllm]
    loop: asyncio.Runner

    def failure(self, check: Callable[[SmokeChecks], Awaitable[str]], runtime: Runtime | None = None) -> str:
        """Return the reason of a failed check, "" if it passed."""

        async def find() -> str:
            try:
                await check(SmokeChecks(runtime or self.runtime))
            except AgentR1Error as error:
                return str(error)
            return ""

        return self.loop.run(find())


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    tokenizer = load_tokenizer("tiny-base")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(FakeVllm("tiny-base", CONTEXT, decode=lambda ids: tokenizer.decode(list(ids))))
            for _ in range(2)
        ]
        engine = {"engine.backend": "vllm", "engine.vllm.urls": tuple(server.url for server in servers)}
        runtime = build_runtime(config_of(**engine, **{"engine.vllm.stall_seconds": 60.0}), TASKSET)
        loop = stack.enter_context(asyncio.Runner())
        yield Setup(runtime, servers, loop)
        loop.run(runtime.engine.close())


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (Fault.WRONG_LOGPROBS, SmokeChecks.check_canary),
        (Fault.OTHER_SHAPES, SmokeChecks.check_canary),
        (Fault.OLD_WEIGHTS, SmokeChecks.check_publication),
    ],
)
def test_a_server_that_lies_is_named(
    fault: Fault, check: Callable[[SmokeChecks], Awaitable[str]], setup: Setup
) -> None:
    assert setup.failure(SmokeChecks.check_canary) == ""
    setup.servers[1].faults.add(fault)
    found = setup.failure(check)
    setup.servers[1].faults.clear()
    assert setup.servers[1].url in found and setup.servers[0].url not in found
    assert setup.failure(SmokeChecks.check_canary) == ""  # it serves again after it stopped lying


def test_a_server_that_does_not_answer_is_named(setup: Setup) -> None:
    engine = setup.runtime.config.engine
    hasty = engine.model_copy(update={"vllm": engine.vllm.model_copy(update={"stall_seconds": 0.2})})
    runtime = replace(setup.runtime, config=setup.runtime.config.model_copy(update={"engine": hasty}))
    server = setup.servers[0]
    server.faults.add(Fault.HANG)
    found = setup.failure(SmokeChecks._compare_replicas, runtime)
    server.faults.clear()
    server.hung.set()
    server.hung.clear()
    assert found == f"{server.url}: no answer for 0.2 s"


def test_servers_that_cannot_be_reached_are_named_with_exit_code_1_and_bad_input_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["smoke", "--quiet", "--engine.backend", "vllm", "--engine.vllm.urls", "http://127.0.0.1:9"]) == 1
    output = capsys.readouterr()
    assert "start failed" in output.err and "127.0.0.1:9" in output.err
    assert main(["smoke", "--quiet", "--group_size", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

"""``agent-r1 smoke`` passes on a working setup, and names the service that lies, dies or does not answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from forked_ranks import ForkedRank
from inference.fake_vllm import FakeVllm, Fault

from agent_r1.cli import main
from agent_r1.config import Layer
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.inference import InferenceEngine, PolicyVersion, WeightUpdate
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.inference.policy_engine import PolicyEngine
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_tokenizer
from agent_r1.tasksets import build
from agent_r1.tools.function_tool import tool
from agent_r1.trainer import ranks
from agent_r1.trainer.fsdp import FsdpTrainer
from agent_r1.trainer.protocol import Module, PassStats, PreparedBatch
from agent_r1.training.build import EMBEDDED, Runtime, build_runtime
from agent_r1.training.config import RunConfig, TrainConfig, resolve_config
from agent_r1.training.loop import WeightPublisher
from agent_r1.training.policy import Policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.smoke import SmokeReport, smoke
from agent_r1.training.smoke_checks import CheckOutcome, SmokeChecks, reject

CONTEXT = 512
TASKSET = build("tinywiki", None, None, 0)


def config_of(**settings: object) -> TrainConfig:
    values = {"group_size": 2, "max_tokens": 12, "context": CONTEXT, **settings}
    return resolve_config(TrainConfig, [Layer("test", values)], TASKSET)


def outcomes(report: SmokeReport) -> dict[str, str]:
    return {result.name: result.outcome for result in report.results}


def test_a_working_setup_passes_and_no_run_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["smoke", "--group_size", "2", "--max_tokens", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["first_failure"] is None and not list(tmp_path.iterdir())
    found = {check["name"]: check["outcome"] for check in report["checks"]}
    assert [name for name, outcome in found.items() if outcome != "passed"] == ["lost replica", "ranks"]
    assert set(found.values()) == {"passed", "not applicable"} and len(found) == 9


class Deaf(TorchEngine):
    """An engine that reports new weights and keeps the old ones."""

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return update.version


def deaf(policy: Policy, config: RunConfig) -> InferenceEngine:
    return Deaf(policy.model, policy.context_length, config.engine)


def test_an_engine_that_keeps_old_weights_is_named() -> None:
    report = smoke(config_of(), TASKSET, SilentProgress(), replace(EMBEDDED, engine=deaf))
    assert outcomes(report)["canary"] == "passed"
    assert report.first_failure is not None and report.first_failure.name == "publication"
    assert "log-probabilities differ from the trainer's" in report.first_failure.detail


@pytest.mark.parametrize("is_wrong", [False, True])
def test_ranks_that_compute_another_gradient_are_named(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "start_process", ForkedRank)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    forward_backward = FsdpTrainer.forward_backward

    def halve(trainer: FsdpTrainer, batch: PreparedBatch, *, scale: float, modules: frozenset[Module]) -> PassStats:
        return forward_backward(trainer, batch, scale=scale / 2, modules=modules)

    if is_wrong:
        monkeypatch.setattr(FsdpTrainer, "forward_backward", halve)
    report = smoke(config_of(**{"trainer.ranks": 2}), TASKSET, SilentProgress())
    assert outcomes(report)["ranks"] == ("failed" if is_wrong else "passed")
    first = report.first_failure
    assert (
        first is None
        if not is_wrong
        else first is not None and "between 1 and 2 ranks, gradients differ" in first.detail
    )


class Setup:
    """A runtime on two servers, and an event loop in which its checks run."""

    def __init__(
        self, runtime: Runtime, servers: Sequence[FakeVllm], checks: SmokeChecks, loop: asyncio.Runner
    ) -> None:
        self.runtime, self.servers, self.checks, self._loop = runtime, servers, checks, loop

    def run(
        self, check: Callable[[SmokeChecks], Awaitable[CheckOutcome]], checks: SmokeChecks | None = None
    ) -> CheckOutcome:
        async def find() -> CheckOutcome:
            try:
                return await check(checks or self.checks)
            except AgentR1Error as error:
                return reject(str(error))

        return self._loop.run(find())


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    tokenizer = load_tokenizer("tiny-base")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(FakeVllm("tiny-base", CONTEXT, decode=lambda ids: tokenizer.decode(list(ids))))
            for _ in range(2)
        ]
        engine = {"engine.backend": "vllm", "engine.vllm.urls": tuple(server.url for server in servers)}
        runtime = build_runtime(config_of(**engine, **{"engine.vllm.stall_seconds": 60.0}), TASKSET)
        publisher = stack.enter_context(closing(WeightPublisher(runtime.engine, tmp_path_factory.mktemp("weights"))))
        loop = stack.enter_context(asyncio.Runner())
        yield Setup(runtime, servers, SmokeChecks(runtime, publisher), loop)
        loop.run(runtime.engine.close())


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (Fault.WRONG_LOGPROBS, SmokeChecks.check_canary),
        (Fault.RAW_LOGPROBS, SmokeChecks.check_canary),
        (Fault.NO_LOGPROBS, SmokeChecks.check_canary),
        (Fault.OTHER_SHAPES, SmokeChecks.check_canary),
        (Fault.KEPT_CACHE, SmokeChecks.check_canary),
        (Fault.OLD_HEAD, SmokeChecks.check_publication),
        (Fault.OLD_WEIGHTS, SmokeChecks.check_publication),
        (Fault.OLD_CACHE, SmokeChecks.check_publication),
    ],
)
def test_a_server_that_lies_is_named(
    fault: Fault, check: Callable[[SmokeChecks], Awaitable[CheckOutcome]], setup: Setup
) -> None:
    """It serves again after it stopped lying."""
    assert setup.run(SmokeChecks.check_canary).outcome == "passed"
    setup.servers[1].faults.add(fault)
    found = setup.run(check)
    setup.servers[1].faults.clear()
    assert found.outcome == "failed" and setup.servers[1].url in found.detail, found
    assert setup.servers[0].url not in found.detail
    assert setup.run(SmokeChecks.check_canary).outcome == "passed"


def test_a_server_that_does_not_answer_is_named(setup: Setup) -> None:
    assert setup.run(SmokeChecks.check_canary).outcome == "passed"
    hasty = setup.runtime.config.model_copy(
        update={
            "engine": setup.runtime.config.engine.model_copy(
                update={"vllm": setup.runtime.config.engine.vllm.model_copy(update={"stall_seconds": 0.2})}
            )
        }
    )
    checks = SmokeChecks(replace(setup.runtime, config=hasty), setup.checks._publisher)
    server = setup.servers[0]
    server.faults.add(Fault.HANG)
    found = setup.run(SmokeChecks._compare_replicas, checks)
    server.faults.clear()
    server.hung.set()
    server.hung.clear()
    assert found.outcome == "failed" and f"{server.url} answered nothing for 0.2 s" in found.detail


@tool
def broken(number: int) -> str:
    """Fail."""
    raise ConnectionError(f"no route to host {number}")


def test_tools_that_do_not_answer_are_named(setup: Setup) -> None:
    """A tool that raises on right arguments fails; one that raises on made-up arguments may be right to do so."""
    assert setup.run(SmokeChecks.check_tools).outcome == "passed"
    search = TASKSET.env.tools[0].name

    def found_with(env: ToolEnv) -> CheckOutcome:
        runtime = replace(setup.runtime, taskset=replace(TASKSET, env=env))
        return setup.run(SmokeChecks.check_tools, SmokeChecks(runtime, setup.checks._publisher))

    def dead(query: str) -> str:
        """Search."""
        raise ConnectionError("no route to host")

    found = found_with(ToolEnv([tool(name=search)(dead)]))
    assert found.outcome == "failed" and f"{search}: raised" in found.detail and "no route to host" in found.detail
    assert found_with(ToolEnv([broken])).outcome == "passed"
    found = found_with(ToolEnv([broken], turn_rewards=lambda action, results: {"bad": float("nan")}))
    assert found.outcome == "failed" and "the environment failed" in found.detail


class Process:
    """The process of a fake server, which can be killed."""

    def __init__(self, server: FakeVllm) -> None:
        self.server = server

    def kill(self) -> None:
        self.server.die()


def test_the_requests_of_a_killed_server_are_completed(setup: Setup) -> None:
    """This is the last test of the servers, because one of them dies."""
    assert setup.run(SmokeChecks.check_canary).outcome == "passed"
    assert setup.run(SmokeChecks.check_lost_replica).detail == "this run did not start the servers"
    engine = setup.runtime.engine
    assert isinstance(engine, PolicyEngine)
    engine._shared.servers = tuple(map(Process, setup.servers))  # type: ignore[arg-type]
    found = setup.run(SmokeChecks.check_lost_replica)
    assert found.outcome == "passed" and "8 requests completed" in found.detail
    assert setup.servers[0].url in found.detail
    assert "not all servers work" in setup.run(SmokeChecks.check_lost_replica).detail


def test_servers_that_cannot_be_reached_are_named_with_exit_code_1_and_bad_input_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["smoke", "--quiet", "--engine.backend", "vllm", "--engine.vllm.urls", "http://127.0.0.1:9"]) == 1
    output = capsys.readouterr()
    assert "the first check that failed: start" in output.out and "127.0.0.1:9" in output.err
    assert main(["smoke", "--quiet", "--group_size", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

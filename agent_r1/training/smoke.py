"""``agent-r1 smoke``: checks of a cluster before a long run, with the services that the run would use."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from agent_r1.core.errors import AgentR1Error
from agent_r1.core.taskset import TaskSet
from agent_r1.training.build import Placement, Runtime, build_runtime
from agent_r1.training.config import TrainConfig
from agent_r1.training.environments import close_environments, with_environments
from agent_r1.training.loop import WeightPublisher
from agent_r1.training.progress import Progress
from agent_r1.training.run import with_splits
from agent_r1.training.servers import ServerRefused
from agent_r1.training.smoke_checks import CheckOutcome, OutcomeName, SmokeChecks, reject

START = "start"

CHECKS: Mapping[str, Callable[[SmokeChecks], Awaitable[CheckOutcome]]] = {
    "canary": SmokeChecks.check_canary,
    "tools": SmokeChecks.check_tools,
    "episodes": SmokeChecks.check_episodes,
    "update": SmokeChecks.check_update,
    "log-probabilities": SmokeChecks.check_logprobs,
    "publication": SmokeChecks.check_publication,
    "lost replica": SmokeChecks.check_lost_replica,
    "ranks": SmokeChecks.check_ranks,
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: its name and outcome, its duration, the reason, and the measured numbers.

    Example:
        CheckResult(name="canary", outcome="passed", seconds=0.4, detail="2e-06 on average, 1e-05 at most (..)",
                    figures={"gap_mean": 2e-06})
    """

    name: str
    outcome: OutcomeName
    seconds: float
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SmokeReport:
    results: tuple[CheckResult, ...]

    @property
    def first_failure(self) -> CheckResult | None:
        return next((result for result in self.results if result.outcome == "failed"), None)

    def to_json(self) -> dict[str, Any]:
        first = self.first_failure
        return {
            "passed": first is None,
            "first_failure": None if first is None else first.name,
            "checks": [asdict(result) for result in self.results],
        }


def render_report(report: SmokeReport) -> Group:
    grid = Grid("check", "outcome", "seconds", "detail", box=box.SIMPLE_HEAD)
    for result in report.results:
        grid.add_row(*map(Text, (result.name, result.outcome, f"{result.seconds:.1f}", result.detail)))
    first = report.first_failure
    return Group(grid, Text("all checks passed" if first is None else f"the first check that failed: {first.name}"))


def smoke(config: TrainConfig, taskset: TaskSet, progress: Progress, placement: Placement | None = None) -> SmokeReport:
    """Check the services that a run with the settings ``config`` would use, and return the results.

    The arguments are as for :func:`agent_r1.training.run.train`. Nothing is written to the folder of a run.

    Raises:
        InvalidInput: the settings cannot be used.
    """
    config = _one_optimizer_step(config)
    taskset = with_environments(with_splits(taskset, config.splits), config)
    began = time.perf_counter()
    try:
        runtime = build_runtime(config, taskset, placement)
    except ServerRefused as error:
        first = CheckResult(START, "failed", time.perf_counter() - began, str(error))
        skipped = [CheckResult(name, "not applicable", 0.0, "the services did not start") for name in CHECKS]
        return SmokeReport((first, *skipped))
    ranks, engine = config.trainer.ranks, config.engine
    servers = [f"{len(engine.vllm.urls) or engine.replicas} vLLM servers"] if engine.backend == "vllm" else []
    several = [f"{ranks} ranks"] if ranks > 1 else []
    detail = ", ".join([config.model, f"{runtime.policy.model.num_parameters():,} weights", *several, *servers])
    first = CheckResult(START, "passed", time.perf_counter() - began, detail)
    return SmokeReport((first, *asyncio.run(_run_checks(runtime, progress))))


def _one_optimizer_step(config: TrainConfig) -> TrainConfig:
    # Return a copy of ``config`` with one optimizer step per update, so that gradients can be compared.
    one = {"minibatches": 1, "critic_epochs": None, "critic_minibatches": 1}
    algorithm = config.algorithm.model_copy(update={"epochs": 1})
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=one), "algorithm": algorithm})


async def _run_checks(runtime: Runtime, progress: Progress) -> list[CheckResult]:
    results = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="agent-r1-smoke-") as folder,
            closing(WeightPublisher(runtime.engine, Path(folder))) as publisher,
        ):
            checks = SmokeChecks(runtime, publisher)
            for name, check in CHECKS.items():
                progress.print_line(f"{name} ..")
                results.append(await _timed(name, check(checks)))
    finally:
        runtime.trainer.close()
        await close_environments(runtime.taskset)
        for engine in runtime.engines.values():
            await engine.close()
    return results


async def _timed(name: str, check: Awaitable[CheckOutcome]) -> CheckResult:
    began = time.perf_counter()
    try:
        found = await check
    except (AgentR1Error, TimeoutError) as error:
        found = reject(str(error) or "it took too long")
    return CheckResult(name, found.outcome, time.perf_counter() - began, found.detail, found.figures)

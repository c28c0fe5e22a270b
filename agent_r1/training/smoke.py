"""``agent-r1 smoke``: checks before a long run, with the services that the run would use.

The checks stop at the first failure, because each of them uses what the checks before it have shown to work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from agent_r1.core.errors import AgentR1Error, EngineError
from agent_r1.core.inference import InferenceEngine
from agent_r1.core.taskset import TaskSet
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import STATUS_POLICY, Group
from agent_r1.inference.canary import BANDS, compute_canary, measure_gap
from agent_r1.inference.policy_engine import PolicyEngine
from agent_r1.model.adapter import trained_weights
from agent_r1.model.weights import product_precision
from agent_r1.rollout.collector import NullRecorder
from agent_r1.trainer.updater import Trained
from agent_r1.training.build import Placement, Runtime, build_runtime
from agent_r1.training.config import TrainConfig
from agent_r1.training.environments import close_environments, with_environments
from agent_r1.training.loop import make_collector, publish_weights
from agent_r1.training.progress import Progress
from agent_r1.training.run import with_splits
from agent_r1.training.sampling import group_requests
from agent_r1.training.servers import ServerRefused

GROUPS, MAX_GROUP_SIZE = 2, 4
VISIBLE_CHANGE = 4.0  # of log-probabilities, in multiples of the limit for rounding errors


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. ``detail`` has the measured numbers, or the reason of a failure."""

    name: str
    passed: bool
    detail: str


def smoke(
    config: TrainConfig, taskset: TaskSet, progress: Progress, placement: Placement | None = None
) -> list[CheckResult]:
    """Check the services of a run with the settings ``config``, up to the first failure. Write no run."""
    # Two small groups have too few sequences for several minibatches: take one optimizer step.
    one_step = {"minibatches": 1, "critic_epochs": None, "critic_minibatches": 1}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=one_step)})
    taskset = with_environments(with_splits(taskset, config.splits), config)
    try:
        runtime = build_runtime(config, taskset, placement)
    except ServerRefused as error:
        return [CheckResult("start", False, str(error))]
    first = CheckResult("start", True, f"engine {config.engine.backend}, {config.trainer.ranks} ranks of the trainer")
    return [first, *asyncio.run(_run_checks(runtime, progress))]


async def _run_checks(runtime: Runtime, progress: Progress) -> list[CheckResult]:
    results: list[CheckResult] = []
    try:
        checks = SmokeChecks(runtime)
        for name, check in checks.by_name.items():
            progress.print_line(f"{name} ..")
            try:
                results.append(CheckResult(name, True, await check()))
            except (AgentR1Error, TimeoutError) as error:
                return [*results, CheckResult(name, False, str(error) or "it took too long")]
    finally:
        runtime.trainer.close()
        await close_environments(runtime.taskset)
        await runtime.engine.close()
    return results


class SmokeChecks:
    """The checks, in their order. Each method returns the measured numbers as text, or raises AgentR1Error."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._groups: list[Group] = []
        self._metrics: Mapping[str, float] = {}
        self.by_name = {
            "canary": self.check_canary,
            "episodes": self.check_episodes,
            "update": self.check_update,
            "log-probabilities": self.check_logprobs,
            "publication": self.check_publication,
        }

    async def check_canary(self) -> str:
        """Publish the weights, and compare the log-probabilities of fixed prompts (the canary) on each replica."""
        update = await run_in_thread(self._runtime.updater.publish)
        served = await publish_weights(self._runtime.engine, update)
        if served != update.version:
            raise AgentR1Error(f"the engine reports {served} instead of {update.version}")
        return await self._compare_replicas()

    async def check_episodes(self) -> str:
        """Sample a small batch of attempts as training does. All of them have to end and to be scored."""
        config, taskset = self._runtime.config, self._runtime.taskset
        small = config.model_copy(update={"group_size": min(config.group_size, MAX_GROUP_SIZE)})
        requests = islice(group_requests(taskset.tasks("train"), small, kind=taskset.kind), GROUPS)
        collector = make_collector(self._runtime, NullRecorder(), "smoke")
        async with aclosing(collector.collect(requests)) as groups:
            self._groups = [group async for group in groups]
        attempts = [trajectory for group in self._groups for trajectory in group.trajectories]
        for one in attempts:
            if STATUS_POLICY[one.status] != "train" or None in one.rewards.values():
                raise AgentR1Error(f"an attempt ended as {one.status.value}: {one.reason or 'a reward is missing'}")
        return f"{len(attempts)} attempts, {sum(len(attempt.turns) for attempt in attempts)} turns"

    async def check_update(self) -> str:
        """Take one optimizer step on the sampled batch."""
        updater, groups = self._runtime.updater, []
        for group in self._groups:  # a weak model often earns equal rewards, which would give no training signal
            rewarded = (replace(one, rewards={"smoke": k % 2.0}) for k, one in enumerate(group.trajectories))
            groups.append(updater.select(replace(group, trajectories=tuple(rewarded))))
        update = await updater.update(groups)
        self._metrics = update.metrics
        reasons = [outcome.reason for outcome in update.outcomes if not isinstance(outcome, Trained)]
        if self._metrics.get("skipped_steps", 0.0) or len(reasons) == len(update.outcomes):
            raise AgentR1Error(reasons[0] if reasons else "a loss or a gradient is not finite")
        return f"gradient norm {self._metrics.get('policy_gradient_norm', 0.0):.3g}"

    async def check_logprobs(self) -> str:
        """Compare the log-probabilities of the sampled tokens in engine and trainer, by the limit of the monitor."""
        config, gap = self._runtime.config, self._metrics.get("logprob_gap")
        if gap is None:
            return "not measured, because the update used no sampled token"
        limit = config.monitor.gap_limit(*map(product_precision, (config.trainer.dtype, config.engine.dtype)))
        if gap > limit:
            raise AgentR1Error(f"the largest difference is {gap:.2g} (limit {limit:g})")
        return f"differences of {gap:.2g} at most (limit {limit:g})"

    async def check_publication(self) -> str:
        """Change the weights visibly, and check that each replica serves the change. Then restore the weights."""
        weights = trained_weights(self._runtime.policy.model)
        original = {name: weight.detach().cpu().clone() for name, weight in weights.items()}
        change = await run_in_thread(self._change_weights, original)
        try:
            found = await self.check_canary()
        finally:
            await run_in_thread(self._runtime.updater.load_weights, original)
        await self.check_canary()
        return f"log-probabilities moved by {change:.2g}, and the gap is {found}"

    async def _compare_replicas(self) -> str:
        config, engine, model = self._runtime.config, self._runtime.engine, self._runtime.policy.model
        replicas: dict[str, InferenceEngine] = {"the engine": engine}
        if isinstance(engine, PolicyEngine):
            if lost := engine.pool.reasons():
                raise AgentR1Error(lost)
            replicas = {replica.name: replica for replica in engine.pool.replicas}
        precision, seconds = product_precision(config.engine.dtype), config.engine.vllm.stall_seconds
        limits, gaps = f"limits {BANDS[precision].mean:g} and {BANDS[precision].maximum:g} in {precision}", []
        for name, replica in replicas.items():
            try:
                async with asyncio.timeout(seconds):
                    gaps.append(await measure_gap(replica, model))
            except (EngineError, TimeoutError) as error:
                raise AgentR1Error(f"{name}: {str(error) or f'no answer for {seconds:g} s'}") from error
            if not gaps[-1].is_rounding(precision):
                raise AgentR1Error(f"{name}: its log-probabilities differ from the trainer's by {gaps[-1]} ({limits})")
        return f"{max(gaps, key=lambda gap: gap.mean)} ({limits})"

    def _change_weights(self, original: Mapping[str, Tensor]) -> float:
        # Add more and more noise, until the log-probabilities move by more than rounding errors could.
        updater, before = self._runtime.updater, self._canary_logprobs()
        wanted = VISIBLE_CHANGE * BANDS[product_precision(self._runtime.config.engine.dtype)].mean
        change, scale = 0.0, 0.01
        while change < wanted and scale < 1000:
            noisy = {}
            for name, weight in original.items():
                spread = scale * (float(weight.float().std(correction=0)) or 0.02)  # 0: all its elements are equal
                noisy[name] = weight + (spread * torch.randn(weight.shape)).to(weight.dtype)
            updater.load_weights(noisy)
            updater.publish()  # copies the weights of ranks into the model of this process
            change, scale = float((self._canary_logprobs() - before).abs().mean()), 2 * scale
        return change

    def _canary_logprobs(self) -> Tensor:
        canary = compute_canary(self._runtime.policy.model)
        return torch.tensor([logprob for prompt in canary for logprob in prompt.logprobs])

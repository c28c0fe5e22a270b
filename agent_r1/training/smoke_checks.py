"""The checks of ``agent-r1 smoke``. Each check tests a service of a run, such as the engine or the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from torch import Tensor

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Canary, InferenceEngine, ProductPrecision, Prompt, SamplingParams
from agent_r1.core.messages import Message, ToolResult, ToolSpec
from agent_r1.core.taskset import Responder, script, tool_call
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import STATUS_POLICY, Group, Status, Trajectory
from agent_r1.gateway.agent_program import AgentProgramEnv
from agent_r1.inference.canary import BANDS, LogprobGap, compute_canary, measure_gap
from agent_r1.inference.policy_engine import PolicyEngine
from agent_r1.model.adapter import trained_weights
from agent_r1.model.weights import product_precision
from agent_r1.rollout.collector import Collector, GroupRequest
from agent_r1.rollout.scripted_agent import NullRecorder, ScriptedAgent, no_gate
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS, ToolErrorKind
from agent_r1.trainer.oom_retry import OutOfMemory
from agent_r1.trainer.report import Trained
from agent_r1.trainer.updater import SelectedGroup, UpdateReport
from agent_r1.training.build import Runtime, group_requests, rebuild_trainer, rollout_limits
from agent_r1.training.loop import WeightPublisher, make_collector
from agent_r1.training.smoke_measures import first_moments, largest_gap, mean_change, relative_difference, with_noise

GROUPS, MAX_GROUP_SIZE = 2, 4

GRADIENT_TOLERANCE: Mapping[ProductPrecision, float] = {"float32": 1e-3, "tf32": 1e-2, "bfloat16": 5e-2}
"""The largest allowed difference between an update by one rank and the same update by several ranks.

The key is the precision of the trainer's matrix products. The limit holds for the relative difference of the gradients,
and for the difference of the losses.
"""

VISIBLE_CHANGE = 4.0
"""The change of log-probabilities that counts as visible, in multiples of the limit for rounding errors.

``check_publication`` changes the weights until the log-probabilities change this much.
"""

MAX_DOUBLINGS = 16
"""The maximum number of noise levels that ``check_publication`` tries. Each level is twice the level before.

The check adds noise to the weights until the log-probabilities change by ``VISIBLE_CHANGE``.
"""

DRILL_TOKENS = 64

OutcomeName = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    outcome: OutcomeName
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)


def accept(detail: str, **figures: float) -> CheckOutcome:
    return CheckOutcome("passed", detail, figures)


def reject(detail: str, **figures: float) -> CheckOutcome:
    return CheckOutcome("failed", detail, figures)


def skip(reason: str) -> CheckOutcome:
    return CheckOutcome("not applicable", reason)


class SmokeChecks:
    """The checks of the services of a run. Call the methods in the order of their definition.

    Each method raises AgentR1Error or TimeoutError if a service fails. The last check closes the trainer.
    """

    def __init__(self, runtime: Runtime, publisher: WeightPublisher) -> None:
        self._runtime, self._publisher = runtime, publisher
        engine = runtime.config.engine
        self._limit = engine.vllm.stall_seconds
        self._groups: list[Group] = []
        self._update: UpdateReport | None = None
        self._gradient: Mapping[str, Tensor] = {}

    async def check_canary(self) -> CheckOutcome:
        """Publish the weights, and check the log-probabilities of fixed prompts (the canary).

        The check fails if a replica of the engine differs from the trainer by more than rounding errors.
        """
        update = await run_in_thread(self._runtime.updater.publish)
        served = await self._publisher.publish(update)
        if served != update.version:
            return reject(f"the engine reports {served} instead of {update.version}")
        return await self._compare_replicas()

    async def check_tools(self) -> CheckOutcome:
        """Check that each tool of the environment answers a call.

        The calls are copied from the gold (right) solutions of the first training task. A tool that the solutions do
        not call is called with made-up arguments.
        """
        taskset = self._runtime.taskset
        env, task = taskset.env_for_split("train"), taskset.tasks("train")[0]
        if isinstance(env, AgentProgramEnv):
            return skip("an agent of your own calls its tools itself")
        if not env.tools:
            return skip("the environment lists no tools")
        gold = () if taskset.solutions is None else taskset.solutions(task).gold
        scripts: list[Responder] = [solution.respond for solution in gold]
        known = [call for trajectory in await self._play(scripts) for call in _tool_calls(trajectory)]
        rest = [tool for tool in env.tools if tool.name not in {name for name, _ in known}]
        made_up = [script(tool_call(tool.name, **_arguments(tool)), Message.assistant("")) for tool in rest]
        others = await self._play(made_up)
        for trajectory in others:
            if trajectory.status is Status.ENVIRONMENT_FAILED:
                return reject(f"the environment failed: {trajectory.reason}")
        calls = [call for trajectory in others for call in _tool_calls(trajectory)]
        broken = [*_broken(known, INVALID_CALL_KINDS), *_broken(calls, {*INVALID_CALL_KINDS, ToolErrorKind.RAISED})]
        silent = {tool.name for tool in env.tools} - {name for name, _ in (*known, *calls)}
        if broken or silent:
            return reject("; ".join([*broken, *(f"{name} was not called" for name in sorted(silent))]))
        sandbox = "" if taskset.sandbox is None else f"; sandbox {taskset.sandbox}"
        names = ", ".join(tool.name for tool in env.tools)
        return accept(f"{names} answered{sandbox}", calls=len(known) + len(calls))

    async def check_episodes(self) -> CheckOutcome:
        """Sample a small batch of attempts as training does, and check that all of them end and are scored."""
        config, taskset = self._runtime.config, self._runtime.taskset
        small = config.model_copy(update={"group_size": min(config.group_size, MAX_GROUP_SIZE)})
        requests = islice(group_requests(taskset.tasks("train"), small, kind=taskset.kind), GROUPS)
        collector = make_collector(self._runtime, NullRecorder(), "smoke")
        async with aclosing(collector.collect(requests, no_gate)) as groups:
            self._groups = [group async for group in groups]
        attempts = [trajectory for group in self._groups for trajectory in group.trajectories]
        bad = [one for one in attempts if STATUS_POLICY[one.status] != "train" or None in one.rewards.values()]
        if bad:
            reason = bad[0].reason or "a reward is missing"
            return reject(f"{len(bad)} of {len(attempts)} attempts cannot be trained: {bad[0].status.value}: {reason}")
        turns = [turn for attempt in attempts for turn in attempt.turns]
        tokens = sum(len(turn.action_ids) for turn in turns)
        return accept(f"{len(attempts)} attempts, {len(turns)} turns, {tokens} tokens", attempts=len(attempts))

    async def check_update(self) -> CheckOutcome:
        """Check that the trainer takes one optimizer step on the sampled batch.

        The rewards are replaced, so that they differ within each group.
        """
        if not self._groups:
            return skip("no attempts were sampled")
        updater = self._runtime.updater
        self._update = update = await updater.update(self._batch())
        metrics = update.metrics
        trained = [outcome for outcome in update.outcomes if isinstance(outcome, Trained)]
        if metrics.get("skipped_steps", 0.0) or not trained:
            reasons = [outcome.reason for outcome in update.outcomes if not isinstance(outcome, Trained)]
            return reject(reasons[0] if reasons else "a loss or a gradient is not finite")
        if self._runtime.config.trainer.ranks > 1:
            self._gradient = first_moments((await run_in_thread(updater.state)).tensors)
        norm = metrics.get("policy_gradient_norm", 0.0)
        return accept(f"{len(trained)} attempts trained, gradient norm {norm:.3g}", gradient_norm=norm)

    async def check_logprobs(self) -> CheckOutcome:
        """Check that engine and trainer compute the same log-probabilities of the sampled tokens.

        The largest allowed difference is the limit of the health monitor.
        """
        if self._update is None or "logprob_gap" not in self._update.metrics:
            return skip("no update of the policy was made")
        config, gap = self._runtime.config, self._update.metrics["logprob_gap"]
        limit = config.monitor.gap_limit(*map(product_precision, (config.trainer.dtype, config.engine.dtype)))
        shown = f"{self._update.metrics['logprob_gap_mean']:.2g} on average, {gap:.2g} at most (limit {limit:g})"
        return (accept if gap <= limit else reject)(shown, gap=gap, limit=limit)

    async def check_publication(self) -> CheckOutcome:
        """Change and publish the weights, and check that the engine serves the changed weights.

        At the end, restore the original weights.
        """
        updater, model = self._runtime.updater, self._runtime.policy.model
        original = {name: weight.detach().cpu().clone() for name, weight in trained_weights(model).items()}
        before = await run_in_thread(compute_canary, model)
        change = await run_in_thread(self._change_weights, original, before)
        loop = asyncio.get_running_loop()
        try:
            update = await run_in_thread(updater.publish)
            began = loop.time()
            served = await self._publisher.publish(update)
            seconds = loop.time() - began
            found = await self._compare_replicas()
        finally:
            await run_in_thread(updater.load_weights, original)
        if served != update.version or found.outcome == "failed":
            return found if served == update.version else reject(f"the engine reports {served}, not {update.version}")
        await self._publisher.publish(await run_in_thread(updater.publish))
        if lost := self._lost_replicas():
            return reject(lost)
        detail = f"log-probabilities moved by {change:.2g}, and the gap is {found.detail}; {seconds:.2g} s"
        return accept(detail, change=change, publish_seconds=seconds, **found.figures)

    async def check_lost_replica(self) -> CheckOutcome:
        """Kill a server that has requests. Check that the other servers complete old and new requests."""
        engine = self._runtime.engine
        if not isinstance(engine, PolicyEngine):
            return skip("the engine is not a pool of servers")
        if len(engine.servers) < 2:
            why = "this run starts one server" if engine.servers else "this run did not start the servers"
            return skip(why)
        if lost := self._lost_replicas():
            return skip(f"not all servers work: {lost}")
        length = self._runtime.policy.context_length // 2
        params = SamplingParams(max_tokens=min(DRILL_TOKENS, length))
        canary = await run_in_thread(compute_canary, self._runtime.policy.model)
        prompt = Prompt(canary[0].token_ids[:length])
        names = [f"smoke {number}" for number in range(2 * len(engine.servers))]
        requests = [asyncio.create_task(engine.generate(prompt, params, session_id=name)) for name in names]
        async with asyncio.timeout(self._limit):
            while not engine.pool.loads[0] and not all(request.done() for request in requests):
                await asyncio.sleep(0)
            engine.servers[0].kill()
            await asyncio.gather(*requests)
            # the sessions of the killed server go on, on other servers
            again = await asyncio.gather(*(engine.generate(prompt, params, session_id=name) for name in names))
        if engine.pool.num_serving != len(engine.servers) - 1:
            return reject(f"{engine.pool.num_serving} of {len(engine.servers)} servers serve after one was killed")
        return accept(f"{len(requests) + len(again)} requests completed; {engine.pool.reasons()}")

    async def check_ranks(self) -> CheckOutcome:
        """Check that one rank and several ranks compute equal losses and gradients for the sampled batch.

        The gradients are compared by their norms and by AdamW's first moments, which are proportional to the clipped
        gradients. The trainer with several ranks is closed before the trainer with one rank starts.
        """
        config = self._runtime.config
        if config.trainer.ranks == 1:
            return skip("trainer.ranks is 1")
        if self._update is None or not self._gradient:
            return skip("the ranks made no update")
        alone = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 1})})
        self._runtime.trainer.close()
        runtime = await run_in_thread(rebuild_trainer, replace(self._runtime, config=alone))
        try:
            expected = await runtime.updater.update(self._batch())
        except OutOfMemory as error:
            return skip(f"one process cannot hold the update ({error})")
        gradient = first_moments((await run_in_thread(runtime.updater.state)).tensors)
        norms, losses = (largest_gap(self._update, expected, ending) for ending in ("_gradient_norm", "_loss"))
        difference = max(relative_difference(self._gradient, gradient), norms)
        limit, ranks = GRADIENT_TOLERANCE[product_precision(config.trainer.dtype)], config.trainer.ranks
        shown = f"between 1 and {ranks} ranks, gradients differ by {difference:.2g} and losses by {losses:.2g}"
        is_same = difference <= limit and losses <= limit
        return (accept if is_same else reject)(f"{shown} (limit {limit:g})", gradient=difference, loss=losses)

    async def _compare_replicas(self) -> CheckOutcome:
        if lost := self._lost_replicas():
            return reject(lost)
        precision, model = product_precision(self._runtime.config.engine.dtype), self._runtime.policy.model
        band = BANDS[precision]
        limits = f"limits {band.mean:g} and {band.maximum:g} in {precision}"
        gaps, wrong = list[LogprobGap](), list[str]()
        for name, replica in _replicas(self._runtime.engine).items():
            try:
                async with asyncio.timeout(self._limit):
                    gaps.append(await measure_gap(replica, model))
            except EngineError as error:
                wrong.append(f"{name}: {error}")
            except TimeoutError:
                wrong.append(f"{name} answered nothing for {self._limit:g} s")
            else:
                differs = f"{name}: its log-probabilities differ from the trainer's by {gaps[-1]} ({limits})"
                wrong += [] if gaps[-1].is_rounding(precision) else [differs]
        if wrong:
            return reject("; ".join(wrong))
        worst = max(gaps, key=lambda gap: gap.mean)
        return accept(f"{worst} ({limits})", gap_mean=worst.mean, gap=worst.largest)

    def _lost_replicas(self) -> str:
        engine = self._runtime.engine
        return engine.pool.reasons() if isinstance(engine, PolicyEngine) else ""

    async def _play(self, scripts: Sequence[Responder]) -> list[Trajectory]:
        taskset, limits = self._runtime.taskset, rollout_limits(self._runtime.config)
        agent = ScriptedAgent(taskset.env_for_split("train"), lambda attempt: scripts[attempt.group_id])
        collector = Collector(agent, (), NullRecorder(), "smoke", replace(limits, retries=0))
        task = taskset.tasks("train")[0]
        requests = (GroupRequest(number, task, 1) for number in range(len(scripts)))
        async with aclosing(collector.collect(requests, no_gate)) as groups:
            return [group.trajectories[0] async for group in groups]

    def _batch(self) -> list[SelectedGroup]:
        # Return the sampled groups with alternating rewards 0 and 1, so that every group has a training signal.
        rewarded = [
            replace(group, trajectories=tuple(map(_with_reward, group.trajectories, _alternating(group.group_id))))
            for group in self._groups
        ]
        return [self._runtime.updater.select(group) for group in rewarded]

    def _change_weights(self, original: Mapping[str, Tensor], before: Canary) -> float:
        wanted = VISIBLE_CHANGE * BANDS[product_precision(self._runtime.config.engine.dtype)].mean
        scale, change = 0.01, 0.0
        for _ in range(MAX_DOUBLINGS):
            self._runtime.updater.load_weights(with_noise(original, scale))
            self._runtime.updater.publish()  # copies the weights of ranks into the model of this process
            change = mean_change(before, compute_canary(self._runtime.policy.model))
            if change >= wanted:
                break
            scale *= 2
        return change


def _replicas(engine: InferenceEngine) -> dict[str, InferenceEngine]:
    if isinstance(engine, PolicyEngine):
        return {replica.name: replica for replica in engine.pool.replicas}
    return {"the engine": engine}


def _tool_calls(trajectory: Trajectory) -> Iterator[tuple[str, ToolResult]]:
    for turn in trajectory.turns:
        yield from zip((call.name for call in turn.action.message.calls), turn.results, strict=False)


def _broken(calls: Sequence[tuple[str, ToolResult]], tolerated: Collection[str]) -> list[str]:
    lines = [
        f"{name}: {result.error}: {Message('tool', result.parts).text}"
        for name, result in calls
        if not result.ok and result.error not in tolerated
    ]
    return list(dict.fromkeys(lines))


EXAMPLES: Mapping[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


def _arguments(tool: ToolSpec) -> dict[str, Any]:
    properties = tool.parameters.get("properties", {})
    required = {name: properties.get(name, {}) for name in tool.parameters.get("required", ())}
    return {
        name: schema["enum"][0] if schema.get("enum") else EXAMPLES.get(str(schema.get("type")), "1")
        for name, schema in required.items()
    }


def _alternating(first: int) -> Iterator[float]:
    while True:
        yield float(first % 2)
        first += 1


def _with_reward(trajectory: Trajectory, reward: float) -> Trajectory:
    return replace(trajectory, rewards={"smoke": reward})

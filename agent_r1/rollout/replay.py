"""Continuations of recorded attempts, whose mean return is the value of a turn (VinePPO, arXiv:2410.01679, at turns).

An attempt is repeated in a new episode with the same seed, and the engine answers with the recorded tokens until the
turn that is valued. Then the policy samples. If the environment answers other than before, the prompts differ, and the
continuation fails: no value comes from another state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_r1.core.environment import Env, RolloutContext
from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    PolicyVersion,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY, Trajectory
from agent_r1.rollout.agent_loop import Agent, AgentLoop


def valued_turns(attempt: Trajectory) -> Sequence[int]:
    """Return the indices of the turns that follow an action in the environment: their states are valued."""
    if STATUS_POLICY[attempt.status] != "train":
        return ()
    return [turn.index for turn in attempt.turns[1:] if attempt.turns[turn.index - 1].kind == "act"]


@dataclass(frozen=True, slots=True)
class Continuations:
    """Makes rollouts that continue attempts of ``agent`` in ``env``: ``count`` of them from each valued turn."""

    agent: Agent
    env: Env
    count: int

    def rollout(self, attempt: Trajectory, turn: int, seed: int) -> _Continuation:
        """Return a rollout that continues ``attempt`` from ``turn``. ``seed`` is that of the attempt's episode."""
        return _Continuation(self, attempt, turn, seed)


@dataclass(frozen=True, slots=True)
class _Continuation:
    made_by: Continuations
    attempt: Trajectory
    turn: int
    seed: int

    async def run(self, task: Task, context: RolloutContext) -> tuple[Trajectory]:
        agent, env = self.made_by.agent, self.made_by.env
        engine = _ReplayingEngine(agent.engine, self.attempt, self.turn)  # a new one: a failed run is tried again
        # the environment may depend on the seed of the attempt; what is sampled depends on the id of the continuation
        return await AgentLoop(replace(agent, engine=engine), env).run(task, replace(context, seed=self.seed))


class _ReplayingEngine:
    # Answers with the recorded tokens until the turn ``until``, and then asks the engine of the policy.

    def __init__(self, engine: InferenceEngine, attempt: Trajectory, until: int) -> None:
        self._engine, self._attempt, self._until = engine, attempt, until
        self._next = 0
        self._known: list[tuple[int, ...]] = []  # for each turn that was reached, the tokens up to its end

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        if session_id is not None and self._next <= self._until:  # None: a request of the environment to the policy
            turn = self._attempt.turns[self._next]
            self._next += 1
            before = () if turn.parent is None else self._known[turn.parent]
            self._known.append(before + turn.new_ids + turn.action_ids)
            if (prompt.token_ids, prompt.media) != (before + turn.new_ids, self._attempt.prompt_media(turn)):
                reason = f"turn {turn.index} has another prompt than before"
                raise EngineError(f"the environment cannot be replayed: {reason}")
            if turn.index < self._until:
                return Completion(turn.action_ids, turn.logprobs, turn.finish_reason, turn.version_spans)
        return await self._engine.generate(prompt, params, session_id=session_id)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return await self._engine.update_weights(update)

    async def release(self, session_id: str) -> None:
        await self._engine.release(session_id)

    async def close(self) -> None:
        """Do nothing: the engine is used by others."""

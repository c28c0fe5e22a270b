"""Beam search over turns: the conversations with the largest predicted values are continued.

In each turn, the policy samples several actions for every kept conversation, and the environment answers each action.
The conversation after an answer is a state s. A value function predicts V(s), the sum of the rewards that follow the
state. The B conversations with the largest values are kept.

An episode cannot be copied. So each new action gets a new episode, in which the earlier actions are repeated. The
environment has to give the same answers again.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field, replace

from agent_r1.core.environment import Env, RolloutContext
from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    PolicyVersion,
    Prompt,
    SamplingParams,
    ScoredTokens,
    ValueFunction,
    WeightUpdate,
)
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY, Status, Trajectory
from agent_r1.rollout.agent_loop import Agent, AgentLoop

NOT_REPEATED = "an environment answered the same actions differently: beam search needs one that repeats its answers"


@dataclass(frozen=True, slots=True)
class RecordedAction:
    """The tokens of a prompt, and the action that was sampled for this prompt."""

    prompt: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of the beam search."""

    actions: tuple[RecordedAction, ...] = ()  # the actions of the conversation
    # the predicted sum of the rewards that are still to come; minus infinity if the agent loop or the value function
    # failed
    value: float = 0.0
    trajectory: Trajectory | None = None  # the trajectory if the episode has ended, otherwise None


class _TurnEnd(Exception):
    """Raised by a :class:`RepeatingEngine` to end the attempt, if the agent loop requests one action too many."""


@dataclass(slots=True)
class RepeatingEngine:
    """An engine that returns recorded actions in order, then samples a new action, and then ends the attempt."""

    engine: InferenceEngine  # samples the new action
    # the number of the new action. The new action 0 is sampled with the policy's sampling parameters. The new actions
    # 1, 2, .. are sampled with other seeds
    number: int
    temperature: float  # the sampling temperature of the new actions 1, 2, .. if the policy is greedy
    # the recorded actions. The new action is added at the end
    actions: list[RecordedAction] = field(default_factory=list)
    repeated: int = 0  # the number of recorded actions that were returned so far
    state: ScoredTokens = field(default_factory=lambda: ScoredTokens((), ()))  # all tokens of the conversation so far
    is_sampled: bool = False  # whether the new action was sampled
    # whether the agent loop requested an action after the new action. If so, the conversation has not ended, and a
    # later attempt can continue the conversation
    goes_on: bool = False

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        if session_id is None:  # not an action: the environment queries the policy
            return await self.engine.generate(prompt, params)
        self.state = self.state.continued(prompt.token_ids)
        if self.is_sampled:
            self.goes_on = True
            raise _TurnEnd
        if self.repeated < len(self.actions):
            recorded = self.actions[self.repeated]
            if recorded.prompt != prompt.token_ids:
                raise EngineError(NOT_REPEATED)
            self.repeated += 1
            completion = recorded.completion
        else:
            completion = await self.engine.generate(prompt, self._varied(params))
            self.actions.append(RecordedAction(prompt.token_ids, completion))
            self.is_sampled = True
        self.state += ScoredTokens(completion.token_ids, completion.logprobs)
        return completion

    def _varied(self, params: SamplingParams) -> SamplingParams:
        if self.number == 0:
            return params
        seed = random.Random(f"{params.seed} {self.number}").getrandbits(63)
        return replace(params, temperature=params.temperature or self.temperature, seed=seed, on_tokens=None)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        raise EngineError("the weights do not change during an attempt")

    async def release(self, session_id: str) -> None:
        """Do nothing, because ``engine`` samples without a session id, and so has no session to release."""

    async def close(self) -> None:
        """Do nothing, because other attempts use the same engine."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The settings of a beam search over turns."""

    # predicts the sum of the rewards that follow a state (a conversation after the environment's answer)
    values: ValueFunction
    beams: int  # B, the number of conversations that are kept after each turn
    candidates: int  # the number of new actions in a turn, for all kept conversations together; a multiple of ``beams``
    # if the policy's temperature is 0, all new actions of a turn except one are sampled at ``temperature``. If the
    # policy's temperature is above 0, ``temperature`` is not used
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class TurnBeam:
    """A rollout that makes one attempt by beam search over turns. Rewards already given do not count in a value."""

    agent: Agent
    env: Env
    search: BeamSearch

    async def run(self, task: Task, context: RolloutContext) -> tuple[Trajectory]:
        """Make one attempt at the task, in several conversations. Return the trajectory of the best conversation."""
        kept: list[Conversation] = [Conversation()]
        try:
            while any(one.trajectory is None for one in kept):
                # At first there is one conversation, which gets all continuations.
                open_ones = [one for one in kept if one.trajectory is None]
                each = self.search.candidates // (self.search.beams if kept[0].actions else 1)
                started = [one for one in open_ones for _ in range(each)]
                grown = await asyncio.gather(
                    *(self._continue(one, number, task, context) for number, one in enumerate(started))
                )
                every = [*(one for one in kept if one.trajectory is not None), *grown]
                kept = sorted(every, key=lambda one: -one.value)[: self.search.beams]
        finally:
            await self.search.values.release(str(context.id))
        best = kept[0].trajectory
        assert best is not None
        return (best,)

    async def _continue(
        self, conversation: Conversation, number: int, task: Task, context: RolloutContext
    ) -> Conversation:
        engine = RepeatingEngine(self.agent.engine, number, self.search.temperature, [*conversation.actions])
        (trajectory,) = await AgentLoop(replace(self.agent, engine=engine), self.env).run(task, context)
        if STATUS_POLICY[trajectory.status] != "train" and not engine.goes_on:
            return Conversation(tuple(engine.actions), -math.inf, trajectory)
        try:
            (value,) = await self.search.values.values(str(context.id), engine.state, [ScoredTokens((), ())])
        except EngineError as error:
            failed = replace(trajectory, status=Status.ENGINE_FAILED, reason=str(error))
            return Conversation(tuple(engine.actions), -math.inf, failed)
        return Conversation(tuple(engine.actions), value, None if engine.goes_on else trajectory)

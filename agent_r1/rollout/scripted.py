"""Agents and engines without a model: a Python function writes each message, or the text of each completion."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agent_r1.core.environment import Env, Episode, RolloutContext, Transition, env_of
from agent_r1.core.inference import (
    NO_POLICY,
    Capabilities,
    Completion,
    FinishReason,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import Responder
from agent_r1.core.trajectory import AttemptId, Trajectory
from agent_r1.renderers.byte_tokenizer import OneTokenImages, byte_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.user_code import validate_messages, validate_transition

AsyncResponder = Callable[[tuple[Message, ...], int], Awaitable[Message]]
"""A responder that waits for its message, for example from a client."""

LOGPROB = math.log(0.5)
"""The log-probability of every token of a ScriptedEngine, which stands for a model."""

UNLIMITED_TOKENS = 10**9
"""The limit on tokens for scripted agents. The limit is so high that no episode reaches it."""


class ScriptedEngine:
    """An InferenceEngine without a model: ``reply(prompt)`` returns the text of the completion for a prompt's text."""

    def __init__(self, renderer: TemplateRenderer, reply: Callable[[str], str]) -> None:
        self._renderer, self._reply = renderer, reply
        self._version = 0
        self.capabilities = Capabilities(frozenset({"shared_memory"}), deterministic=True)
        self.released: list[str] = []

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        await asyncio.sleep(0)  # let other attempts run, as an engine with a model does
        text = str(self._renderer.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False))
        ids = (*self._renderer.encode(self._reply(text)), self._renderer.end_token_id)
        return _completion_of(ids, params, LOGPROB, self._version)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        self._version = update.version.number
        return update.version

    async def release(self, session_id: str) -> None:
        self.released.append(session_id)

    async def close(self) -> None:
        """Do nothing, because the engine holds no resources."""


def _completion_of(ids: Sequence[int], params: SamplingParams, logprob: float, version: int) -> Completion:
    # as if a model had generated the tokens, unless a condition or a limit of ``params`` ends them before
    if (condition := params.stop_condition) is not None:
        ids = ids[: next((count for count in range(1, len(ids)) if condition.is_met(ids[:count])), len(ids))]
    kept = tuple(ids[: params.max_tokens])
    finish_reason: FinishReason = "stop" if len(kept) == len(ids) else "length"
    return Completion(kept, (logprob,) * len(kept), finish_reason, (PolicyVersionSpan(0, version),))


class ScriptedAgent:
    """A rollout in which responders write the messages. If one raises, its attempt ends as ENGINE_FAILED.

    The tokens are those with which ``renderer`` writes the messages; by default, a token stands for a byte. As a script
    writes no other tokens, their log-probability is 0, and their version is NO_POLICY.
    """

    def __init__(
        self,
        env: Env,
        policy_for: Callable[[AttemptId], Responder | AsyncResponder],
        renderer: TemplateRenderer | None = None,
    ) -> None:
        self._env, self._policy_for = env, policy_for
        self._renderer = renderer or TemplateRenderer(byte_tokenizer(images=True), images=OneTokenImages())

    async def run(self, task: Task, context: RolloutContext) -> tuple[Trajectory]:
        scripted = _ScriptedEpisode(self._env, self._policy_for, self._renderer)
        agent = Agent(scripted, self._renderer, SamplingParams(max_tokens=UNLIMITED_TOKENS), UNLIMITED_TOKENS)
        return await AgentLoop(agent, scripted).run(task, context)


class _ScriptedEpisode:
    # The environment, the episode and the engine of one attempt. A responder gets messages, and an engine only tokens.
    # As the environment sees all messages, it hands them over to the engine, which is the same object.

    capabilities = Capabilities(frozenset({"shared_memory"}), deterministic=True)

    def __init__(
        self, env: Env, policy_for: Callable[[AttemptId], Responder | AsyncResponder], renderer: TemplateRenderer
    ) -> None:
        self._env, self._policy_for, self._renderer = env, policy_for, renderer
        self._episode: Episode | None = None
        self._respond: Responder | AsyncResponder | None = None
        self._conversation: tuple[Message, ...] = ()
        self._turn = 0
        self.tools = env.tools
        self.start: tuple[Message, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> Episode:
        env = env_of(self._env, task)
        self.tools = env.tools
        self._episode = await env.open(task, context)
        self._respond = self._policy_for(context.id)
        self.start = self._conversation = validate_messages(self._episode.start)
        return self

    async def step(self, action: Action) -> Transition:
        assert self._episode is not None
        self._turn += 1
        transition = validate_transition(await self._episode.step(action))
        self._conversation += (action.message, *transition.messages)
        return transition

    async def close(self) -> None:
        if self._episode is not None:
            await self._episode.close()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        assert self._respond is not None
        await asyncio.sleep(0)
        before = self._conversation
        given = self._respond(before, self._turn)
        message = await given if isinstance(given, Awaitable) else given
        ids = self._renderer.write_action(before, message, self.tools)
        # no stop condition: what the script writes is the action, also if a policy would have stopped before
        return _completion_of(ids, replace(params, stop_condition=None), 0.0, NO_POLICY)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return update.version

    async def release(self, session_id: str) -> None:
        """Do nothing, because a session uses no resources."""

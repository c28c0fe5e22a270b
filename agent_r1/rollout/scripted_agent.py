"""An agent that is no model: what it says next, someone decides who sees the messages and no tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import Env, Episode, RolloutContext, Transition
from agent_r1.core.inference import Capabilities, Completion, Prompt, SamplingParams
from agent_r1.core.messages import Action, Message
from agent_r1.core.reference_solution import Responder
from agent_r1.core.task import Task
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.renderers.byte_tokenizer import byte_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.scripted_engine import completion_of

UNLIMITED_TOKENS = 10**9
"""Tokens: nobody who is no model runs out of them."""


class ScriptedAgent:
    """Engine and environment in one: it says what ``casting(attempt)`` decides, in the episodes of ``env``.

    What it says goes the way of all that a policy says: through the chat's tokens, the parser, the agent loop and the
    environment. Live it as ``performer.agent.live(performer, task, context)``, or give both to a collector. An ``Responder``
    that raises fails the engine for its attempt.

    Example:
        ScriptedAgent(env, lambda attempt: script(Message.assistant("<answer>Bruno</answer>")))
    """

    def __init__(self, env: Env, casting: Callable[[AttemptId], Responder]) -> None:
        self._env, self._casting = env, casting
        self._renderer = TemplateRenderer(byte_tokenizer())
        self._roles: dict[str, _Role] = {}
        self.tools = env.tools
        self.capabilities = Capabilities(frozenset({"shared_memory"}), deterministic=True)
        self.agent = Agent(self, self._renderer, SamplingParams(max_tokens=UNLIMITED_TOKENS), UNLIMITED_TOKENS)

    async def open(self, task: Task, context: RolloutContext) -> Episode:
        episode = await self._env.open(task, context)
        role = _Role(episode, self._casting(context.id), list(episode.start))
        self._roles[str(context.id)] = role
        return role

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        await asyncio.sleep(0)
        role = self._roles[str(session_id)]
        message = role.act(tuple(role.said), role.turn)
        return completion_of(self._renderer, self._worded(tuple(role.said), message), params, 0)

    def _worded(self, said: tuple[Message, ...], message: Message) -> str:
        """The message as the chat's template words it."""
        before = self._renderer.render_text(said, self.tools, add_generation_prompt=True)
        after = self._renderer.render_text((*said, message), self.tools, add_generation_prompt=False)
        end = str(self._renderer.tokenizer.decode([self._renderer.end_token_id]))
        return after.removeprefix(before).rpartition(end)[0]

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        """There are no weights to replace."""
        return update.version

    async def release(self, session_id: str) -> None:
        self._roles.pop(session_id, None)

    async def close(self) -> None:
        """Nothing runs between two calls."""


@dataclass(slots=True)
class _Role:
    """An episode whose conversation is followed."""

    episode: Episode
    act: Responder
    said: list[Message]
    start: tuple[Message, ...] = field(init=False)
    turn: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.start = self.episode.start

    async def step(self, action: Action) -> Transition:
        self.turn += 1
        transition = await self.episode.step(action)
        self.said += (action.message, *transition.messages)
        return transition

    async def close(self) -> None:
        await self.episode.close()

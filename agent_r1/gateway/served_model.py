"""A model that is served for inference. Each request is a separate conversation."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

from agent_r1.core.attempt_id import AttemptId
from agent_r1.gateway.chat import Answer, ChatRequest, Choice, Draft, LiveAnswer, Opening, RequestError
from agent_r1.gateway.episode import as_error, context_error, exceeds, unsupported
from agent_r1.gateway.sampled_choice import generate, sampled_choice
from agent_r1.gateway.streams import LiveReader
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.session import Session
from agent_r1.rollout.session_values import SessionPrompt, Stopped
from agent_r1.rollout.user_code import isolate

MAX_CONCURRENT = 256
"""Maximum number of answers that are sampled at the same time. Further requests wait."""

SEED_BITS = 62


class ServedModel:
    """A model that answers requests for inference, and records no turns.

    A request that does not set the temperature, top_p or max_tokens gets the value of ``agent.params``.
    """

    def __init__(self, agent: Agent, name: str) -> None:
        self.name, self.max_concurrent = name, MAX_CONCURRENT
        self._agent, self._slots = agent, asyncio.Semaphore(MAX_CONCURRENT)

    async def draft(self, request: ChatRequest, live: LiveAnswer) -> Draft:
        """Sample the answer to a request. Equal requests with a seed get equal answers.

        If the request asks for one choice, ``live`` gets the tokens while they are sampled.
        """
        prompt, session = self._prompt(request), self._session(request, live)
        try:
            id = secrets.token_hex(12)
            if request.n == 1:
                live.opening = Opening(id, len(prompt.token_ids))
                live.read = LiveReader(self._agent.renderer, request).read
            results = await generate(session, prompt, request, self._slots)
        finally:
            await session.close()
        choices = []
        for result in results:
            if isinstance(result, Stopped):
                raise as_error(result, len(prompt.token_ids), self._agent.context_length)
            choices.append(_with_new_ids(sampled_choice(result, request, self._agent.renderer)))
        return Draft(Answer(id, tuple(choices), len(prompt.token_ids)), lambda: None)

    def count_tokens(self, request: ChatRequest) -> int:
        return len(self._prompt(request).token_ids)

    def _prompt(self, request: ChatRequest) -> SessionPrompt:
        if request.previous is not None:
            message = "this endpoint keeps no responses: send the whole conversation as input"
            raise RequestError(404, message, code="previous_response_not_found", param="previous_response_id")
        if exceeds(request.conversation, request.tools, self._agent.context_length):
            raise context_error(self._agent.context_length)
        with isolate(unsupported):
            return self._session(request, LiveAnswer()).new_branch(request.conversation, request.tools)

    def _session(self, request: ChatRequest, live: LiveAnswer) -> Session:
        agent = self._agent
        temperature = agent.params.temperature if request.temperature is None else request.temperature
        top_p = agent.params.top_p if request.top_p is None else request.top_p
        max_tokens = request.max_tokens or agent.params.max_tokens
        sampling = replace(agent.params, temperature=temperature, top_p=top_p, max_tokens=max_tokens)
        params = replace(sampling, on_tokens=live.set_tokens)
        seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
        # The seed of a generation depends on the task and the numbers of an attempt, but not on the name of its run.
        attempt = AttemptId(secrets.token_hex(12), "served", 0, 0)
        return Session(agent.engine, agent.renderer, params, agent.context_length, attempt, seed=seed)


def _with_new_ids(choice: Choice) -> Choice:
    """Return a copy of ``choice`` with new random ids for its tool calls."""
    calls = tuple(replace(call, id=f"call_{secrets.token_hex(8)}") for call in choice.message.calls)
    return replace(choice, message=replace(choice.message, calls=calls))

"""The policy within one episode, as a model that an agent calls over HTTP."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from functools import partial
from itertools import chain

from agent_r1.core.environment import Transition
from agent_r1.core.inference import SamplingParams
from agent_r1.core.tool import ToolSpec
from agent_r1.core.trajectory import Status
from agent_r1.gateway.chat import Answer, ChatRequest, Draft, LiveAnswer, Messages, RequestError
from agent_r1.gateway.config import GatewayConfig
from agent_r1.gateway.conversations import SentAction, restore_sampled, rewrites_answer
from agent_r1.gateway.dialect import refuse, warn_once
from agent_r1.gateway.sampled_choice import generate, sampled_choice
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.session import Session
from agent_r1.rollout.session_values import Sample, SessionPrompt, Stopped
from agent_r1.rollout.user_code import isolate

MAX_TOKEN_CHARACTERS = 32
"""An upper bound of the average number of characters per token in a long text."""

POLICY = "policy"
"""The name of the policy in the list of models. A request with any other name also goes to the policy."""


class EpisodeModel:
    """The policy within one episode, as a model that answers requests.

    Each answer that a client receives becomes a turn of the session. If a conversation begins with earlier turns, the
    new turn continues their tokens. Any other conversation starts a new branch, for example the conversation of a
    sub-agent.

    The run determines the sampling: ``temperature``, ``top_p`` and ``seed`` of a request have no effect.
    """

    def __init__(self, agent: Agent, session: Session, config: GatewayConfig) -> None:
        self.name, self.max_concurrent = POLICY, config.max_concurrent
        self._agent, self._session, self._max_turns = agent, session, config.max_turns
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._num_answers = 0  # sampled or being sampled, also those that no client received
        self._sent: list[SentAction] = []
        self._conversations: dict[str, Messages] = {}  # the conversation up to each answer, by the id of the answer
        self._num_requests = 0
        self._openings: dict[int, Messages] = {}  # the conversation of each new branch, by the number of its request
        self.failure: Stopped | None = None
        """The reason why the last request got no answer; None if the last request got an answer."""
        self.is_cut = False
        """Whether a limit of the run cut the last answer. A limit that the agent itself requested does not count."""

    @property
    def start(self) -> Messages:
        """The messages of the first request that was answered; () if no request was answered."""
        return self._openings[min(self._openings)] if self._openings else ()

    async def draft(self, request: ChatRequest, live: LiveAnswer) -> Draft:
        """Sample the answer to a request. The draft's ``deliver`` records the answer as turns.

        ``live`` stays empty: a client gets only complete answers. Raise RequestError if no turns or tokens are left, or
        if the request fails.
        """
        number, self._num_requests = self._num_requests, self._num_requests + 1
        _warn_about_sampling(request, self._agent.params)
        messages = self._resolve(request)
        if request.n > self._max_turns:
            raise refuse("n", f"got {request.n}; the episode has {self._max_turns} turns")
        if self._num_answers + request.n > self._max_turns:
            self.failure = Stopped(Status.OUT_OF_TURNS)
            raise RequestError(403, f"the episode has reached its {self._max_turns} turns", code="turn_limit_exceeded")
        if exceeds(messages, request.tools, self._agent.context_length):
            self.failure = Stopped(Status.OUT_OF_TOKENS)
            raise context_error(self._agent.context_length)
        with isolate(unsupported):
            prompt = self._session.prompt(messages, request.tools)
        if prompt.parent is None and rewrites_answer(messages, self._sent):
            warn_once("the agent changes an answer, or the tools after it: each such request starts a new branch")
        self._num_answers += request.n
        try:
            samples = await self._sample(prompt, request)
        except RequestError:
            self._num_answers -= request.n
            raise
        choices = tuple(sampled_choice(sample, request, self._agent.renderer) for sample in samples)
        answer = Answer(secrets.token_hex(12), choices, len(prompt.token_ids))
        return Draft(answer, partial(self._deliver, number, request, prompt, samples, answer))

    def count_tokens(self, request: ChatRequest) -> int:
        messages = self._resolve(request)
        if exceeds(messages, request.tools, self._agent.context_length):
            raise context_error(self._agent.context_length)
        with isolate(unsupported):
            return len(self._session.prompt(messages, request.tools).token_ids)

    def _resolve(self, request: ChatRequest) -> Messages:
        """Return the whole conversation of a request, with each action of this session as the policy sampled it.

        The conversation of an earlier response (``request.previous``) comes first.
        """
        if request.previous is not None:
            if request.previous not in self._conversations:
                raise RequestError(
                    404,
                    f"there is no response {request.previous!r} in this episode",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            request = replace(request, messages=self._conversations[request.previous] + request.messages)
        return restore_sampled(request.conversation, self._sent)

    async def _sample(self, prompt: SessionPrompt, request: ChatRequest) -> list[Sample]:
        results = await generate(self._session, prompt, request, self._slots)
        for stopped in results:
            if isinstance(stopped, Stopped):
                self.failure = stopped
                raise as_error(stopped, len(prompt.token_ids), self._agent.context_length)
        return [sample for sample in results if isinstance(sample, Sample)]

    def _deliver(
        self, number: int, request: ChatRequest, prompt: SessionPrompt, samples: list[Sample], answer: Answer
    ) -> None:
        """Add the prompt and the samples to the session as turns. ``number`` is the index of the request in this
        episode.
        """
        self.failure, session = None, self._session
        if prompt.parent is None:
            self._openings[number] = prompt.messages
        session.add_observation(prompt)
        for sample, choice in zip(samples, answer.choices, strict=True):
            action = session.accept(sample)
            session.observe(Transition(()), request.tools)
            self.is_cut = self._is_cut(sample, request)
            self._sent.append(SentAction(prompt.messages, choice.message, action.message))
        if request.n == 1:
            conversation = prompt.messages[request.instructions is not None :]
            self._conversations[answer.id] = (*conversation, answer.choices[0].message)

    def _is_cut(self, sample: Sample, request: ChatRequest) -> bool:
        length, own = len(sample.completion.token_ids), self._agent.params.max_tokens
        by_agent = request.max_tokens is not None and length == request.max_tokens < own
        return sample.completion.finish_reason == "length" and not by_agent


def exceeds(messages: Messages, tools: tuple[ToolSpec, ...], context_length: int) -> bool:
    """Return whether a conversation is certainly too long for the context. The conversation is not tokenized."""
    texts = chain(
        (part for message in messages for part in (message.text, message.reasoning or "")),
        (call.raw for message in messages for call in message.calls),
        (str(tool.parameters) + tool.description for tool in tools),
    )
    return sum(map(len, texts)) > MAX_TOKEN_CHARACTERS * context_length


def context_error(context_length: int, num_tokens: int | None = None) -> RequestError:
    """Return the error for a conversation that is longer than the context. Both lengths are in tokens."""
    size = "too many" if num_tokens is None else num_tokens
    message = f"the conversation has {size} tokens, and the context of the model {context_length}"
    return RequestError(400, message, code="context_length_exceeded", param="messages")


def as_error(stopped: Stopped, num_tokens: int, context_length: int) -> RequestError:
    """Return the error for a request whose answer was not sampled. ``num_tokens`` is the length of the prompt."""
    match stopped.status:
        case Status.OUT_OF_TOKENS:
            return context_error(context_length, num_tokens)
        case Status.ENVIRONMENT_FAILED:
            return RequestError(400, stopped.reason or "the answer cannot be read", code="unsupported_conversation")
        case _:
            reason = stopped.reason or "the engine gave no answer"
            return RequestError(503, reason, code="engine_failed", can_retry=True)


def unsupported(reason: str) -> RequestError:
    """Return the error for a conversation that the chat template cannot render."""
    return RequestError(400, reason, code="unsupported_conversation", param="messages")


def _warn_about_sampling(request: ChatRequest, own: SamplingParams) -> None:
    asked = (("temperature", request.temperature, own.temperature), ("top_p", request.top_p, own.top_p))
    for name, value, used in asked:
        if value is not None and value != used:
            warn_once(f"the agent asks for {name} {value:g}; the run samples with its own, {used:g}")
    if request.seed is not None:
        warn_once("the agent sends a seed, which has no effect: each attempt has seeds of its own")

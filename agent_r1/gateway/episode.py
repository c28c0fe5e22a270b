"""The policy within one episode, as a model that an agent calls over HTTP."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from agent_r1.core.environment import Transition
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message, Text, ToolSpec
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.gateway.chat import (
    ChatAnswer,
    ChatRequest,
    Choice,
    Draft,
    LiveAnswer,
    Messages,
    RequestError,
    StreamStart,
    refuse,
    warn_once,
)
from agent_r1.gateway.config import GatewayConfig
from agent_r1.gateway.streams import LiveReader, generate, sampled_choice
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.session import Sample, Session, SessionPrompt, Stopped
from agent_r1.rollout.user_code import isolate


@dataclass(frozen=True, slots=True)
class SentAction:
    """A sampled action that was sent to the client."""

    before: Messages  # the conversation before the action
    sent: Message  # the message that the client received
    sampled: Message  # the message as the policy sampled it


def restore_sampled(messages: Messages, sent_actions: Sequence[SentAction]) -> Messages:
    """Return ``messages`` with the actions of the policy exactly as the policy sampled them.

    - An assistant message is replaced by an action if both have the same words, the same calls, and the same
      conversation before them. White space, ids of calls and the spelling of JSON can differ.
    - If several actions fit a message, prefer equal ids of calls, then equal text, then the newest action.
    - If a message only begins with the text of an action, only this text is replaced.
    - A tool message that answers a replaced call gets the id of the sampled call.
    """
    restored: list[Message] = []
    ids: dict[str, str] = {}
    for message in messages:
        if message.role == "assistant":
            known = _find(tuple(restored), message, sent_actions)
            if known is not None:
                ids |= {call.id: own.id for call, own in zip(message.calls, known.sampled.calls, strict=False)}
                message = known.sampled
            else:
                message = _continued(tuple(restored), message, sent_actions) or message
        elif message.call_id is not None:
            message = replace(message, call_id=ids.get(message.call_id, message.call_id))
        restored.append(message)
    return tuple(restored)


def rewrites_answer(messages: Messages, sent_actions: Sequence[SentAction]) -> bool:
    """Return whether ``messages`` have an assistant message, changed or not, at the place of a sent action."""
    return any(
        messages[: len(action.before)] == action.before
        and any(message.role == "assistant" for message in messages[len(action.before) :][:1])
        for action in sent_actions
    )


def _find(before: Messages, message: Message, sent_actions: Sequence[SentAction]) -> SentAction | None:
    same = [action for action in sent_actions if action.before == before and _is_same(message, action.sent)]
    ids = [call.id for call in message.calls]
    return max(
        reversed(same),  # max returns the first of equally good actions, which is the newest here
        key=lambda action: ([call.id for call in action.sent.calls] == ids, action.sent.text == message.text),
        default=None,
    )


def _continued(before: Messages, message: Message, sent_actions: Sequence[SentAction]) -> Message | None:
    # An agent can write text after the action, such as the stop string that ended it, into the same message.
    if message.calls or message.reasoning is not None:
        return None
    given = message.text.lstrip()
    begun = [action.sampled for action in sent_actions if action.before == before and _begins(action.sampled, given)]
    if not begun:
        return None
    sampled = max(begun, key=lambda action: len(action.text))
    added = given.removeprefix(sampled.text.strip())
    if not added.strip():
        return sampled
    separated = added.lstrip() if sampled.text[-1].isspace() else added
    return replace(sampled, parts=(Text(sampled.text + separated),))


def _begins(sampled: Message, text: str) -> bool:
    own = sampled.text.strip()
    return bool(own) and not sampled.calls and sampled.reasoning is None and text.startswith(own)


def _is_same(given: Message, sent: Message) -> bool:
    # Reasoning is compared only if the message has reasoning, because many clients do not send reasoning back.
    if given.text.split() != sent.text.split() or len(given.calls) != len(sent.calls):
        return False
    if given.reasoning is not None and given.reasoning.split() != (sent.reasoning or "").split():
        return False
    pairs = zip(given.calls, sent.calls, strict=True)
    return all(a.name == b.name and _canonical(a.arguments) == _canonical(b.arguments) for a, b in pairs)


def _canonical(arguments: object) -> str:
    return json.dumps(arguments, sort_keys=True)


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
        self.has_cut_answer = False
        """Whether any limit cut the last answer."""

    @property
    def start(self) -> Messages:
        """The messages of the first request that was answered; () if no request was answered."""
        return self._openings[min(self._openings)] if self._openings else ()

    async def draft(self, request: ChatRequest, live: LiveAnswer) -> Draft:
        """Sample the answer to a request. The draft's ``deliver`` records the answer as turns.

        Raise RequestError if no turns or tokens are left, or if the request fails.
        """
        # ``live`` stays empty: an answer becomes a turn only when it is complete, so a client gets no part of it before
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
        answer = ChatAnswer(secrets.token_hex(12), choices, len(prompt.token_ids))
        return Draft(answer, partial(self._deliver, number, request, prompt, samples, answer))

    async def count_tokens(self, request: ChatRequest) -> int:
        messages = self._resolve(request)
        if exceeds(messages, request.tools, self._agent.context_length):
            raise context_error(self._agent.context_length)
        with isolate(unsupported):
            return len(self._session.prompt(messages, request.tools).token_ids)

    def _resolve(self, request: ChatRequest) -> Messages:
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
        self, number: int, request: ChatRequest, prompt: SessionPrompt, samples: list[Sample], answer: ChatAnswer
    ) -> None:
        self.failure, session = None, self._session
        if prompt.parent is None:
            self._openings[number] = prompt.messages
        session.add_observation(prompt)
        for sample, choice in zip(samples, answer.choices, strict=True):
            action = session.accept(sample)
            session.observe(Transition(()), request.tools)
            self.has_cut_answer = sample.completion.finish_reason == "length"
            self.is_cut = self.has_cut_answer and not self._is_agents_limit(sample, request)
            self._sent.append(SentAction(prompt.messages, choice.message, action.message))
        if request.n == 1:
            conversation = prompt.messages[request.instructions is not None :]
            self._conversations[answer.id] = (*conversation, answer.choices[0].message)

    def _is_agents_limit(self, sample: Sample, request: ChatRequest) -> bool:
        length, own = len(sample.completion.token_ids), self._agent.params.max_tokens
        return request.max_tokens is not None and length == request.max_tokens < own


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
        """Sample the answer to a request. Equal requests with a seed get equal answers."""
        prompt = await run_in_thread(self._prompt, request)  # other requests go on while a long one is tokenized
        session = self._session(request, live)
        try:
            id = secrets.token_hex(12)
            if request.n == 1:  # several answers are not streamed
                live.start = StreamStart(id, len(prompt.token_ids))
                live.read = LiveReader(self._agent.renderer, request).read
            results = await generate(session, prompt, request, self._slots)
        finally:
            await session.close()
        choices = []
        for result in results:
            if isinstance(result, Stopped):
                raise as_error(result, len(prompt.token_ids), self._agent.context_length)
            choices.append(_with_new_ids(sampled_choice(result, request, self._agent.renderer)))
        return Draft(ChatAnswer(id, tuple(choices), len(prompt.token_ids)), lambda: None)

    async def count_tokens(self, request: ChatRequest) -> int:
        return len((await run_in_thread(self._prompt, request)).token_ids)

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
    calls = tuple(replace(call, id=f"call_{secrets.token_hex(8)}") for call in choice.message.calls)
    return replace(choice, message=replace(choice.message, calls=calls))

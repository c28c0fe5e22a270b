"""A model behind an API that acts in an environment. Its tokens are unknown, so its attempts cannot be trained on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import mul
from typing import Any

from agent_r1.chat_api import ChatApi, Failure, Reply
from agent_r1.core.arguments import parse_arguments
from agent_r1.core.environment import ModelClient
from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import Completion, FinishReason, SamplingParams
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolSpec, from_openai, to_openai
from agent_r1.core.trajectory import AttemptId, Status, TurnKind, TurnTiming
from agent_r1.renderers.formats.tool_format import split_reasoning
from agent_r1.renderers.protocol import RenderedPrompt
from agent_r1.rollout.context_policy import Append, ContextPolicy
from agent_r1.rollout.session import Conversation, Messages, Sample, SessionPrompt, Stopped

log = logging.getLogger(__name__)

REPLACED = {"max_tokens": "max_completion_tokens", "temperature": None}
"""Arguments that some models refuse, and what is sent then. None: the argument is left out."""


@dataclass(frozen=True, slots=True)
class ApiUsage:
    """The tokens of all answers of a model behind an API, as the endpoint reports them."""

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unreported: int = 0  # answers without a report
    cost: float | None = None  # in the currency of the prices; None without prices


@dataclass(slots=True)
class UsageMeter:
    """Counts the tokens of answers."""

    prices: tuple[float, ...] = ()  # of a million prompt tokens and a million completion tokens, or ()
    usage: ApiUsage = ApiUsage()

    def count(self, reply: Reply) -> None:
        reported = (reply.prompt_tokens, reply.completion_tokens)
        old, unreported = self.usage, self.usage.unreported + (None in reported)
        prompt, completion = old.prompt_tokens + (reported[0] or 0), old.completion_tokens + (reported[1] or 0)
        cost = sum(map(mul, self.prices, (prompt, completion))) / 1e6 if self.prices else None
        self.usage = ApiUsage(old.answers + 1, prompt, completion, unreported, cost)


@dataclass(frozen=True, slots=True)
class ApiAgent:
    """A model behind an API, and everything that it needs to act."""

    api: ChatApi
    model: str  # its name at the endpoint
    params: SamplingParams  # max_tokens is the largest number of tokens of one action, temperature 0 asks for greedy
    context_length: int  # the largest number of tokens of a prompt, as the endpoint counts them
    seed: int = 0  # of the environments; a request has no seed
    meter: UsageMeter = field(default_factory=UsageMeter)
    refused: set[str] = field(default_factory=set)  # arguments of ``REPLACED`` that the model has refused
    context_policy: ContextPolicy = field(default_factory=Append)

    def open_session(self, attempt: AttemptId) -> Conversation:
        return ApiSession(self, attempt)

    def client(self, seed: int) -> ModelClient:
        async def complete(messages: tuple[Message, ...], /) -> Message:
            answer = await self.ask(messages, (), 0)
            if isinstance(answer, Failure):
                raise EngineError(answer.reason)
            return answer[0].message

        return complete

    async def ask(self, messages: Messages, tools: tuple[ToolSpec, ...], turn: int) -> tuple[Action, Reply] | Failure:
        """Return the model's next action in a conversation. ``turn`` numbers calls without an id."""

        def read(reply: Reply) -> tuple[Action, Reply] | Failure:
            self.meter.count(reply)  # an answer that cannot be read has its price too
            action = read_action(reply.message, turn)
            return action if isinstance(action, Failure) else (action, reply)

        while True:
            body = self._body(messages, tools)
            answer = await self.api.complete(json.dumps(body).encode(), read)
            if not isinstance(answer, Failure) or not answer.code.startswith("unsupported"):
                return answer
            if answer.param not in REPLACED or answer.param not in body:
                return answer
            if answer.param == "temperature" and answer.param not in self.refused:
                log.warning("%s refuses the temperature %g and has its own", self.model, self.params.temperature)
            self.refused.add(answer.param)

    def _body(self, messages: Messages, tools: tuple[ToolSpec, ...]) -> dict[str, Any]:
        limits = {"max_tokens": self.params.max_tokens, "temperature": self.params.temperature}
        names = {name: REPLACED[name] if name in self.refused else name for name in limits}
        return {
            "model": self.model,
            "messages": list(map(_to_request, messages)),
            **({"tools": [tool.to_openai() for tool in tools]} if tools else {}),
            **{sent: limits[name] for name, sent in names.items() if sent is not None},
        }


class ApiSession(Conversation):
    """The conversation of one attempt with a model behind an API. Its turns have messages and no tokens."""

    def __init__(self, agent: ApiAgent, attempt: AttemptId) -> None:
        super().__init__(attempt)
        self._agent = agent

    def prompt(self, messages: Messages, tools: tuple[ToolSpec, ...] = ()) -> SessionPrompt:
        last = self._turns[-1]
        return SessionPrompt(messages, tools, RenderedPrompt("", ()), (), last.index, last.observation)

    def new_branch(self, messages: Messages, tools: tuple[ToolSpec, ...] = ()) -> SessionPrompt:
        return SessionPrompt(messages, tools, RenderedPrompt("", ()), (), None, messages)

    async def generate(self, prompt: SessionPrompt, kind: TurnKind = "act") -> Sample | Stopped:
        start = self._seconds()
        answer = await self._agent.ask(prompt.messages, prompt.tools, len(self._turns))
        if isinstance(answer, Failure):
            # the code of OpenAI, and the words of vLLM
            too_long = answer.code == "context_length_exceeded" or "maximum context length" in answer.reason
            failed = Status.CANCELLED if answer.is_final else Status.ENGINE_FAILED  # which the collector repeats
            return Stopped(Status.OUT_OF_TOKENS if too_long else failed, answer.reason)
        action, reply = answer
        if (reply.prompt_tokens or 0) >= self._agent.context_length:
            return Stopped(Status.OUT_OF_TOKENS)  # the policy, whose tokens are counted before, has no answer then
        reason: FinishReason = "length" if reply.finish_reason == "length" else "stop"
        timing = TurnTiming(start, self._seconds())
        return Sample(prompt, Completion((), (), reason, ()), action, (), kind, timing)

    async def close(self) -> None:
        """Do nothing, because each request has its own connection."""


def _to_request(message: Message) -> dict[str, Any]:
    # Unlike for a chat template, the arguments are text, and calls that could not be read stay: their results name
    # them. Of those the arguments are left out, because many servers parse them again and refuse the conversation.
    data = to_openai(message)
    if message.calls:
        functions = ({"name": call.name, "arguments": json.dumps(dict(call.arguments or {}))} for call in message.calls)
        pairs = zip(message.calls, functions, strict=True)
        data["tool_calls"] = [{"id": call.id, "type": "function", "function": one} for call, one in pairs]
    return data


def read_action(message: Mapping[str, Any], turn: int) -> Action | Failure:
    """Return the action in a message of an endpoint. A call that cannot be read has an error, as calls of a policy."""
    calls = message.get("tool_calls") or []
    try:
        content = message.get("content") or message.get("refusal")
        text = from_openai({"role": "assistant", "content": content}).text
        read = tuple(_read_call(call, f"call_{turn}_{number}") for number, call in enumerate(calls))
    except (TypeError, ValueError, InvalidInput) as error:
        return Failure(f"a message that cannot be read: {error}")
    thought = message.get("reasoning_content") or message.get("reasoning")
    # Some servers leave the thought in the text, from which it is taken as for a policy.
    reasoning, text = (thought, text) if isinstance(thought, str) else split_reasoning(text)
    return Action(Message("assistant", (Text(text),), read, reasoning), text)


def _read_call(call: object, id: str) -> ToolCall:
    given = call if isinstance(call, dict) else {}
    id = given["id"] if isinstance(given.get("id"), str) and given["id"] else id
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        return ToolCall(id, "unnamed", None, json.dumps(call), 'the call has no "name"')
    value = function.get("arguments")
    raw = value if isinstance(value, str) else json.dumps(value)
    try:
        return ToolCall(id, name, parse_arguments(value), raw)
    except ValueError as error:
        return ToolCall(id, name, None, raw, str(error))

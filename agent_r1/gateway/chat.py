"""Requests to a model and its answers, independent of the dialect (OpenAI, Anthropic) in which a client writes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_r1.core.messages import Message
from agent_r1.core.tool import ToolSpec

Messages = tuple[Message, ...]

EndReason = Literal["stop", "stop_string", "length", "tool_calls"]
"""Why an answer ended: the end of the turn, a stop string of the request, the token limit, or tool calls."""


class RequestError(Exception):
    """A request that is refused or fails, with the HTTP status of the response.

    Attributes:
        code: a word that programs can compare, such as ``context_length_exceeded``; None if there is no such word.
        param: the part of the request that is wrong, such as ``messages.0.content``; None if it is no single part.
        can_retry: whether the same request can succeed later. The clients of OpenAI and Anthropic then try again.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, can_retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.can_retry = status, code, param, can_retry


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next message of a conversation.

    Attributes:
        messages: the conversation, or its new messages if ``previous`` is given.
        n: the number of alternative answers.
        calls_are_text: whether an answer is text even if the policy calls a tool.
        max_tokens: the largest number of tokens of each answer; None for the model's own limit.
        stop_strings: texts that end an answer.
        temperature: None for the model's own temperature, as for ``top_p`` and ``seed``.
        logprobs: whether the answer contains the log-probability of each token.
        instructions: a system message in front of the conversation, which a continued conversation does not inherit.
        ignored: the arguments of the request that have no effect, for a warning.
        previous: the id of an answer that the conversation continues; None if ``messages`` are the whole conversation.
    """

    messages: Messages
    tools: tuple[ToolSpec, ...] = ()
    calls_are_text: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    logprobs: bool = False
    instructions: str | None = None
    ignored: tuple[str, ...] = ()
    previous: str | None = None

    @property
    def conversation(self) -> Messages:
        """The instructions and the messages."""
        return self.messages if self.instructions is None else (Message.system(self.instructions), *self.messages)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token: the text that the token adds, and its log-probability."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the alternative answers to a request.

    Attributes:
        message: the assistant message as the client receives it: without its stop string, and with calls only if the
            request has tools.
        stop_string: the stop string of the request that ended the answer, or None.
        logprobs: one entry for each sampled token, with the token that ended the turn; () if they were not requested.
    """

    message: Message
    end: EndReason
    num_tokens: int
    stop_string: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. ``id`` is unique, without the prefix that a dialect writes."""

    id: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens of all choices."""
        return sum(choice.num_tokens for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Draft:
    """An answer that no client has received. ``deliver`` is called when a client receives it for the first time."""

    answer: Answer
    deliver: Callable[[], None]


class ChatModel(Protocol):
    """What an API key gives access to: the policy within one episode, or a served model.

    Attributes:
        name: the name that the list of models shows.
        max_concurrent: the largest number of requests at the same time.
    """

    name: str
    max_concurrent: int

    def draft(self, request: ChatRequest) -> Awaitable[Draft]:
        """Return the answer to a request, as a draft. Raise RequestError if there is no answer."""
        ...

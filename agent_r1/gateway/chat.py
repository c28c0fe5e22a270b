"""Requests and answers in a form that does not depend on the client's API (OpenAI or Anthropic)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_r1.core.messages import Message
from agent_r1.core.tool import ToolSpec

Messages = tuple[Message, ...]

EndReason = Literal["stop", "stop_string", "length", "tool_calls"]
"""Why an answer ended: the model ended its turn, a stop string, the token limit, or tool calls."""


class RequestError(Exception):
    """Raised if a request is refused or fails. ``status`` is the HTTP status of the response.

    Attributes:
        code: the name of the error for use in programs, such as ``context_length_exceeded``, or None.
        param: the wrong part of the request, such as ``messages.0.content``, or None.
        can_retry: whether the same request can succeed later. If true, clients repeat the request.
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
        messages: the whole conversation. If the request continues an earlier answer, only the messages after this
            answer.
        calls_are_text: whether the answer contains tool calls as text.
        n: the number of alternative answers.
        max_tokens: the limit of tokens per answer. None: the limit of the model.
        temperature, top_p: None for the values of the model.
        seed: None for a random seed.
        instructions: a system message for this request only. The message is left out of the conversation for later
            requests.
        ignored: the arguments of the request that have no effect.
        previous: the id of the earlier answer that the request continues. None: the request continues no answer.
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
        """``messages``, with ``instructions`` before them as a system message."""
        return self.messages if self.instructions is None else (Message.system(self.instructions), *self.messages)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the alternative answers to a request.

    Attributes:
        message: the message for the client, without the stop string. It has tool calls only if the request has tools.
        stop_string: the stop string that ended the answer, or None.
        logprobs: one entry for each sampled token, also for tokens of the stop string. () if not requested.
    """

    message: Message
    end: EndReason
    num_tokens: int
    stop_string: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. ``id`` is a unique text, without the prefix of an API (such as ``chatcmpl-``)."""

    id: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)


PieceKind = Literal["reasoning", "text"]


@dataclass(frozen=True, slots=True)
class Opening:
    """The first part of a stream, sent before the first token. ``id`` is the id of the answer."""

    id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream: a piece of a choice's reasoning or text. ``index`` is the index of the choice."""

    index: int
    kind: PieceKind
    text: str


Part = Opening | Piece | Answer
"""A part of a stream. A stream is an opening, the pieces of reasoning and text, and the complete answer."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A complete answer that was not sent to a client yet. Call ``deliver`` once, when the answer is first sent."""

    answer: Answer
    deliver: Callable[[], None]


@dataclass(slots=True)
class LiveAnswer:
    """An answer while it is sampled. The object stays empty if the model does not support streaming.

    Attributes:
        opening: the first part of the stream; None if the stream cannot begin yet.
        read: converts ``token_ids`` to the part of the message that can already be sent.
        token_ids: the tokens that were sampled so far.
    """

    opening: Opening | None = None
    read: Callable[[tuple[int, ...]], Message] = lambda token_ids: Message.assistant("")
    token_ids: Sequence[int] = ()

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        """Set the attribute ``token_ids`` to all tokens that were sampled so far.

        The engine can call this method from another thread.
        """
        self.token_ids = token_ids

    @property
    def has_begun(self) -> bool:
        return self.opening is not None and len(self.token_ids) > 0


class ChatModel(Protocol):
    """A model that answers requests: the policy within one episode, or a served model.

    Attributes:
        name: the name in the list of models.
        max_concurrent: how many requests are answered at the same time.
    """

    name: str
    max_concurrent: int

    def draft(self, request: ChatRequest, live: LiveAnswer) -> Awaitable[Draft]:
        """Return the answer to a request. The caller sends the answer to the client.

        A model that supports streaming writes the tokens to ``live`` while it samples. Raise RequestError if the
        request is refused or fails.
        """
        ...

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt.

        Raise RequestError if the prompt cannot be rendered or does not fit into the context.
        """
        ...

"""Requests to a model and its answers, independent of the dialect (OpenAI, Anthropic) in which a client writes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_r1.core.messages import Message
from agent_r1.core.tool import ToolSpec

Messages = tuple[Message, ...]

EndReason = Literal["stop", "stop_string", "length", "tool_calls"]
"""The reason why an answer ended.

- stop: the model ended its turn.
- stop_string: a stop string of the request occurred.
- length: the token limit was reached.
- tool_calls: the answer has tool calls.
"""


class RequestError(Exception):
    """Raised if a request is refused or fails. ``status`` is the HTTP status of the response.

    Attributes:
        code: a word that programs can compare, such as ``context_length_exceeded``. None: there is no such word.
        param: the wrong part of the request, such as ``messages.0.content``. None: no single part is wrong.
        can_retry: whether the same request can succeed later. If true, the clients of OpenAI and Anthropic try again.
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
        messages: the whole conversation. If ``previous`` is given, only the messages after the answer ``previous``.
        tools: the tools that the policy can call.
        calls_are_text: if true, the answer contains tool calls of the policy as text.
        n: the number of alternative answers.
        max_tokens: the largest number of tokens of each answer. None: the limit of the model.
        stop_strings: texts that end an answer.
        temperature: the sampling temperature. None: the temperature of the model.
        seed: the seed of the sampling. None: a random seed.
        logprobs: whether the answer contains the log-probability of each token.
        instructions: a system message before ``messages``. It is valid for this request only: a later request that
            continues the answer to this request does not have the system message.
        ignored: the arguments of the request that have no effect. A warning lists these arguments.
        previous: the id of the answer that the request continues. None: the request continues no answer.
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
        """``messages``, preceded by a system message with ``instructions`` if the request has instructions."""
        return self.messages if self.instructions is None else (Message.system(self.instructions), *self.messages)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token: its text and its log-probability."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the alternative answers to a request.

    Attributes:
        message: the assistant message that the client receives. It ends before the stop string. It has tool calls only
            if the request has tools.
        end: the reason why the answer ended.
        num_tokens: the number of sampled tokens.
        stop_string: the stop string that ended the answer, one of the stop strings in the request. None: no stop string
            ended the answer.
        logprobs: one entry for each sampled token, including tokens that ``message`` leaves out, such as the stop
            string. () if the request did not ask for log-probabilities.
    """

    message: Message
    end: EndReason
    num_tokens: int
    stop_string: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        id: a unique text. Each dialect adds a prefix of its own, such as ``chatcmpl-``.
        choices: the alternative answers.
        num_prompt_tokens: the number of tokens of the prompt.
    """

    id: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens in all choices together."""
        return sum(choice.num_tokens for choice in self.choices)


PieceKind = Literal["reasoning", "text"]


@dataclass(frozen=True, slots=True)
class Opening:
    """The first part of a stream, which is sent before the first token.

    ``id`` is the id of the answer. ``num_prompt_tokens`` is the number of tokens of the prompt.
    """

    id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream: a piece of the reasoning or of the visible text of one choice.

    ``index`` is the index of the choice. ``kind`` is "reasoning" or "text". ``text`` is the content of the piece.
    """

    index: int
    kind: PieceKind
    text: str


Part = Opening | Piece | Answer
"""A part of a stream.

A stream consists of an opening, the pieces of all reasoning and text, and the complete answer.
"""


@dataclass(frozen=True, slots=True)
class Draft:
    """A complete answer that was not sent to a client yet.

    ``deliver`` must be called once, when the answer is first sent to a client.
    """

    answer: Answer
    deliver: Callable[[], None]


@dataclass(slots=True)
class LiveAnswer:
    """An answer to a request, while it is sampled. A stream is made from this object.

    If the model does not support streaming, the object stays empty.

    Attributes:
        opening: the first part of the stream; None if the stream cannot begin yet.
        read: converts the tokens of an unfinished answer to the message that can be sent so far.
        token_ids: the tokens that were sampled so far.
    """

    opening: Opening | None = None
    read: Callable[[tuple[int, ...]], Message] = lambda token_ids: Message.assistant("")
    token_ids: Sequence[int] = ()

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        """Replace ``token_ids`` by the tokens that were sampled so far.

        The engine can call this method in a thread of its own.
        """
        self.token_ids = token_ids

    @property
    def has_begun(self) -> bool:
        return self.opening is not None and len(self.token_ids) > 0


class ChatModel(Protocol):
    """A model that answers requests: the policy within one episode, or a served model.

    An API key gives access to one model.

    Attributes:
        name: the name in the list of models.
        max_concurrent: the largest number of requests that are answered at the same time.
    """

    name: str
    max_concurrent: int

    def draft(self, request: ChatRequest, live: LiveAnswer) -> Awaitable[Draft]:
        """Return the answer to a request, as a :class:`Draft`: a complete answer that was not sent to the client yet.

        Raise RequestError if the request is refused or fails. A model that supports streaming writes the
        tokens sampled so far to ``live``, until the answer is complete.
        """
        ...

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt.

        Raise RequestError if the prompt cannot be rendered or cannot fit into the context.
        """
        ...

"""Convert answers to the parts of a stream, during the sampling or after it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from agent_r1.core.messages import Message, Text, ToolCall
from agent_r1.gateway.chat import (
    ChatAnswer,
    ChatRequest,
    Choice,
    Draft,
    EndReason,
    LiveAnswer,
    StreamPart,
    StreamStart,
    TextDelta,
    TokenLogprob,
)
from agent_r1.renderers.protocol import Renderer
from agent_r1.renderers.text_decoding import IncrementalDecoder
from agent_r1.rollout.session import Sample, Session, SessionPrompt, Stopped
from agent_r1.rollout.user_code import isolate


async def generate(
    session: Session, prompt: SessionPrompt, request: ChatRequest, slots: asyncio.Semaphore
) -> list[Sample | Stopped]:
    """Sample ``request.n`` alternative answers concurrently, each with one of ``slots``."""

    async def generate_one() -> Sample | Stopped:
        async with slots:
            return await session.generate(prompt, max_tokens=request.max_tokens, stop_strings=request.stop_strings)

    return await asyncio.gather(*(generate_one() for _ in range(request.n)))


def sampled_choice(sample: Sample, request: ChatRequest, renderer: Renderer) -> Choice:
    """Convert a sampled action to the choice that the client receives."""
    completion = sample.completion
    message, stop_string = cut_at_stop_string(_visible_message(sample, request), request.stop_strings)
    end: EndReason = "stop"
    if completion.finish_reason == "length":
        end = "length"
    elif message.calls:
        end = "tool_calls"
    elif stop_string is not None:
        end = "stop_string"
    logprobs = _token_logprobs(sample, renderer) if request.logprobs else ()
    return Choice(message, end, len(completion.token_ids), stop_string, logprobs)


def _visible_message(sample: Sample, request: ChatRequest) -> Message:
    # The client receives calls as text if its request has no tools or wants no calls, and if the client's API cannot
    # represent one of the calls.
    message = sample.action.message
    if not message.calls:
        return message
    if request.tools and not request.calls_are_text and all(_can_be_sent(call) for call in message.calls):
        return message
    return Message.assistant(sample.action.text)


def _can_be_sent(call: ToolCall) -> bool:
    if call.error is not None or call.arguments is None:
        return False
    try:
        json.dumps([call.name, dict(call.arguments)], ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        return False
    return True


def cut_at_stop_string(message: Message, stop_strings: tuple[str, ...]) -> tuple[Message, str | None]:
    """Cut a message before its first stop string. Return the message and the stop string, or None without one."""
    found = [(index, string) for string in stop_strings if (index := message.text.find(string)) >= 0]
    if not found:
        return message, None
    index, string = min(found)
    return replace(message, parts=(Text(message.text[:index]),)), string


def _token_logprobs(sample: Sample, renderer: Renderer) -> tuple[TokenLogprob, ...]:
    decoder = IncrementalDecoder(renderer.decode)
    texts = [decoder.add((token_id,)) for token_id in sample.completion.token_ids]
    texts[-1:] = ["".join(texts[-1:]) + decoder.flush()]
    return tuple(TokenLogprob(text, logprob) for text, logprob in zip(texts, sample.completion.logprobs, strict=True))


POLL_SECONDS = 0.1
"""The time between two deltas of a live stream, in seconds."""

HELD_CHARACTERS = 32
"""How many characters at the end of an unfinished answer are not sent yet, if the request has tools.

These characters can belong to the mark that begins a tool call. No mark is longer.
"""

LONGEST_TAG = 41
"""The largest length of an unfinished tag, such as ``<tool_c``, in characters. A longer text is not a tag."""

_UNFINISHED_TAG = re.compile(r"<[^<>\s]*\Z")


class LiveReader:
    """A reader that converts the tokens of an unfinished answer to the part of the message that can already be sent."""

    def __init__(self, renderer: Renderer, request: ChatRequest) -> None:
        self._renderer, self._request = renderer, request
        self._decoder, self._text, self._num_read = IncrementalDecoder(renderer.decode), "", 0

    def read(self, token_ids: Sequence[int]) -> Message:
        """Return the message of an unfinished answer, without the parts that later tokens can change.

        ``token_ids`` holds all tokens of the answer so far. Each call decodes only the new tokens.
        """
        new = token_ids[self._num_read :]
        self._num_read = len(token_ids)
        if new and new[-1] in self._renderer.stop_token_ids:
            new = new[:-1]
        self._text += self._decoder.add(new)
        action = self._renderer.parse_text(self._text, 0, self._request.tools)
        return settled_message(action.message, self._request)


def settled_message(message: Message, request: ChatRequest) -> Message:
    """Return the reasoning and the text of an unfinished answer, without characters that later tokens can change.

    If the answer has begun a tool call, return an empty message.
    """
    if message.calls:
        return Message.assistant("")
    message, _ = cut_at_stop_string(message, request.stop_strings)
    longest_stop = max(map(len, request.stop_strings), default=1)
    text = _settled(message.text, max(longest_stop - 1, HELD_CHARACTERS if request.tools else 0))
    reasoning = message.reasoning if message.text else _settled(message.reasoning or "", 0)
    return Message.assistant(text, (), reasoning or None)


def _settled(text: str, num_held: int) -> str:
    # The running time must stay linear in the length of the text, because this function blocks the event loop.
    finished = _without_blank_end(text)
    tag = _UNFINISHED_TAG.search(finished, max(0, len(finished) - LONGEST_TAG))
    end = tag.start() if tag else len(finished)
    return _without_blank_end(finished[: min(end, max(0, len(text) - num_held))])


def _without_blank_end(text: str) -> str:
    return text[: len(text.replace("\ufffd", " ").rstrip())]


def complete_parts(answer: ChatAnswer) -> Iterator[StreamPart]:
    yield StreamStart(answer.id, answer.num_prompt_tokens)
    for index, choice in enumerate(answer.choices):
        yield from _new_deltas({}, index, choice.message)
    yield answer


async def live_parts(live: LiveAnswer, drafting: asyncio.Task[Draft]) -> AsyncIterator[StreamPart]:
    """Yield the parts of the stream of an answer while the answer is sampled.

    ``drafting`` is the asyncio task that samples the answer. ``live.start`` must be set. Raise RequestError if the
    request fails.
    """
    assert live.start is not None
    yield live.start
    sent: _SentTexts = {}
    num_read = 0
    while not drafting.done():
        if len(live.token_ids) != num_read:
            token_ids = tuple(live.token_ids)
            num_read = len(token_ids)
            message = Message.assistant("")
            with suppress(ValueError), isolate(ValueError):  # a renderer can be user code; the answer shows its errors
                message = live.read(token_ids)
            for delta in _new_deltas(sent, 0, message):
                yield delta
        await asyncio.wait({drafting}, timeout=POLL_SECONDS)
    answer = drafting.result().answer
    for index, choice in enumerate(answer.choices):
        for delta in _new_deltas(sent, index, choice.message):
            yield delta
    yield answer


_SentTexts = dict[tuple[int, Literal["reasoning", "text"]], str]
"""The texts that were sent so far, by the index of the choice and the kind of text."""


def _new_deltas(sent: _SentTexts, index: int, message: Message) -> Iterator[TextDelta]:
    texts: tuple[tuple[Literal["reasoning", "text"], str], ...]
    texts = (("reasoning", message.reasoning or ""), ("text", message.text))
    for kind, text in texts:
        before = sent.get((index, kind), "")
        if not before.startswith(text):  # a text becomes shorter if a tool call begins: the rest was sent all the same
            differing = (place for place, (a, b) in enumerate(zip(before, text, strict=False)) if a != b)
            num_common = len(before) if text.startswith(before) else next(differing)
            sent[index, kind] = text
            yield TextDelta(index, kind, text[num_common:])

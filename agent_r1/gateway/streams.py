"""Convert answers to the parts of a stream, during the sampling or after it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress

from agent_r1.core.messages import Message
from agent_r1.gateway.chat import Answer, ChatRequest, Draft, LiveAnswer, Opening, Part, Piece, PieceKind
from agent_r1.gateway.dialect import pieces
from agent_r1.gateway.sampled_choice import cut_at_stop_string
from agent_r1.renderers.incremental_decoder import IncrementalDecoder
from agent_r1.renderers.protocol import Renderer
from agent_r1.rollout.user_code import isolate

POLL_SECONDS = 0.1
"""The time between two pieces of a live stream, in seconds."""

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
    """Return ``text`` without the last characters, which later tokens can change.

    Remove the last ``num_held`` characters, and an unfinished tag at the end. Then remove whitespace and an incomplete
    character (U+FFFD) at the end of the remaining text.
    """
    # The running time must stay linear in the length of the text, because this function blocks the event loop.
    finished = _without_blank_end(text)
    tag = _UNFINISHED_TAG.search(finished, max(0, len(finished) - LONGEST_TAG))
    end = tag.start() if tag else len(finished)
    return _without_blank_end(finished[: min(end, max(0, len(text) - num_held))])


def _without_blank_end(text: str) -> str:
    """Return ``text`` without whitespace and U+FFFD at the end. U+FFFD stands for an incomplete character."""
    return text[: len(text.replace("\ufffd", " ").rstrip())]


def complete_parts(answer: Answer) -> Iterator[Part]:
    """Yield the parts of the stream of a complete answer: an Opening, Pieces, and the answer itself."""
    yield Opening(answer.id, answer.num_prompt_tokens)
    yield from _SentTexts().last_parts(answer)


async def live_parts(live: LiveAnswer, drafting: asyncio.Task[Draft]) -> AsyncIterator[Part]:
    """Yield the parts of the stream of an answer while the answer is sampled.

    ``drafting`` is the asyncio task that samples the answer. ``live.opening`` must be set. Raise RequestError if the
    request fails.
    """
    assert live.opening is not None
    yield live.opening
    sent, num_read = _SentTexts(), 0
    while not drafting.done():
        if len(live.token_ids) != num_read:
            token_ids = tuple(live.token_ids)
            num_read = len(token_ids)
            for piece in sent.new_pieces(0, _read(live, token_ids)):
                yield piece
        await asyncio.wait({drafting}, timeout=POLL_SECONDS)
    for part in sent.last_parts(drafting.result().answer):
        yield part


def _read(live: LiveAnswer, token_ids: tuple[int, ...]) -> Message:
    with suppress(ValueError), isolate(ValueError):  # a renderer can be user code; the complete answer shows its errors
        return live.read(token_ids)
    return Message.assistant("")


class _SentTexts:
    def __init__(self) -> None:
        self._texts: dict[tuple[int, PieceKind], str] = {}

    def new_pieces(self, index: int, message: Message) -> Iterator[Piece]:
        """Yield the unsent reasoning of ``message``, then the unsent text, in pieces. Mark both as sent.

        ``index`` is the index of the choice. If a text does not begin with the sent text, send the part after their
        common beginning: after "abc", the text "abde" gives "de".
        """
        texts: tuple[tuple[PieceKind, str], ...] = (("reasoning", message.reasoning or ""), ("text", message.text))
        for kind, text in texts:
            sent = self._texts.get((index, kind), "")
            if sent.startswith(text):
                continue
            differing = (i for i, (a, b) in enumerate(zip(sent, text, strict=False)) if a != b)
            num_common = len(sent) if text.startswith(sent) else next(differing)
            self._texts[index, kind] = text
            for piece in pieces(text[num_common:]):
                yield Piece(index, kind, piece)

    def last_parts(self, answer: Answer) -> Iterator[Part]:
        for index, choice in enumerate(answer.choices):
            yield from self.new_pieces(index, choice.message)
        yield answer

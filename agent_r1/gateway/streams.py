"""Streams: the parts of an answer, while the answer is sampled or after it is complete."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator

from agent_r1.core.messages import Message
from agent_r1.gateway.chat import Answer, ChatRequest, Draft, LiveAnswer, Opening, Part, Piece, PieceKind
from agent_r1.gateway.dialect import pieces

POLL_SECONDS = 0.1
"""How often new tokens become new pieces of a stream, in seconds."""

HELD_CHARACTERS = 32
"""How many characters are held back if the answer can have tool calls: no format has a longer mark for them."""

_UNFINISHED = re.compile(r"[\s\ufffd]*(<[^<>\s]{0,40})?[\s\ufffd]*\Z")
"""The end of a text that later tokens can change: whitespace, half a character, or the beginning of a tag."""


def settled_message(message: Message, request: ChatRequest) -> Message:
    """Return the reasoning and the text of an unfinished answer, without characters that later tokens can change.

    For example, the beginning of a stop string is left out. If the answer has begun a tool call, the result is an empty
    message.
    """
    if message.calls:
        return Message.assistant("")
    longest_stop = max(map(len, request.stop_strings), default=1)
    text = _settled(message.text, max(longest_stop - 1, HELD_CHARACTERS if request.tools else 0))
    reasoning = message.reasoning if message.text else _settled(message.reasoning or "", 0)
    return Message.assistant(text, (), reasoning or None)


def _settled(text: str, num_held: int) -> str:
    end = _UNFINISHED.search(text)
    return text[: min(max(0, len(text) - num_held), end.start() if end else len(text))].rstrip()


def complete_parts(answer: Answer) -> Iterator[Part]:
    """Yield the parts of the stream of a complete answer: its opening, its pieces, and the answer itself."""
    yield Opening(answer.id, answer.num_prompt_tokens)
    yield from _SentTexts().last_parts(answer)


async def live_parts(live: LiveAnswer, drafting: asyncio.Task[Draft]) -> AsyncIterator[Part]:
    """Yield the parts of the stream of an answer, while the task ``drafting`` samples the answer.

    The last part is the complete answer. ``live.opening`` must already be set. Raise RequestError if the request fails.
    """
    assert live.opening is not None
    yield live.opening
    sent = _SentTexts()
    while not drafting.done():
        for piece in sent.new_pieces(0, live.read(tuple(live.token_ids))):
            yield piece
        await asyncio.wait({drafting}, timeout=POLL_SECONDS)
    for part in sent.last_parts(drafting.result().answer):
        yield part


class _SentTexts:
    """The reasoning and the text of each choice, as far as they were sent."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, PieceKind], str] = {}

    def new_pieces(self, index: int, message: Message) -> Iterator[Piece]:
        """Yield the reasoning and the text of ``message`` that were not sent yet, in pieces, and mark them as sent.

        ``index`` is the index of the choice.
        """
        texts: tuple[tuple[PieceKind, str], ...] = (("reasoning", message.reasoning or ""), ("text", message.text))
        for kind, text in texts:
            sent = self._texts.get((index, kind), "")
            added = text.partition(sent)[2] if sent else text
            self._texts[index, kind] = sent + added
            for piece in pieces(added):
                yield Piece(index, kind, piece)

    def last_parts(self, answer: Answer) -> Iterator[Part]:
        for index, choice in enumerate(answer.choices):
            yield from self.new_pieces(index, choice.message)
        yield answer

"""Sample alternative answers to a request, and convert them to messages for the client."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from agent_r1.core.messages import Message, Text, ToolCall
from agent_r1.gateway.chat import ChatRequest, Choice, EndReason, TokenLogprob
from agent_r1.renderers.incremental_decoder import IncrementalDecoder
from agent_r1.renderers.protocol import Renderer
from agent_r1.rollout.session import Session
from agent_r1.rollout.session_values import Sample, SessionPrompt, Stopped


async def generate(
    session: Session, prompt: SessionPrompt, request: ChatRequest, slots: asyncio.Semaphore
) -> list[Sample | Stopped]:
    """Sample ``request.n`` alternative answers concurrently. Each answer occupies one of ``slots`` during its sampling.

    If the session cannot sample an answer, the list contains a ``Stopped`` object for this answer.
    """

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
    """Return the message that the client receives for a sampled action.

    The client receives calls as text in three cases: ``request.tools`` is empty, ``request.calls_are_text`` is true, or
    the client's API cannot represent one of the calls.
    """
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
    """Cut a message before its first stop string. Return the cut message and this stop string.

    If the message contains no stop string, return the whole message and None.
    """
    found = [(index, string) for string in stop_strings if (index := message.text.find(string)) >= 0]
    if not found:
        return message, None
    index, string = min(found)
    return replace(message, parts=(Text(message.text[:index]),)), string


def _token_logprobs(sample: Sample, renderer: Renderer) -> tuple[TokenLogprob, ...]:
    """Return the text and the log-probability of each sampled token.

    If several tokens encode one character, the last token has the character as its text. The others have "".
    """
    decoder = IncrementalDecoder(renderer.decode)
    texts = [decoder.add((token_id,)) for token_id in sample.completion.token_ids]
    texts[-1:] = ["".join(texts[-1:]) + decoder.flush()]
    return tuple(TokenLogprob(text, logprob) for text, logprob in zip(texts, sample.completion.logprobs, strict=True))

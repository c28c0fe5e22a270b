"""Recognition of sampled actions in the conversations that clients send.

A client sends the whole conversation with each request. The assistant messages in it have been through the client's own
types: arguments of calls were parsed and written again, texts were stripped, ids of calls can be new. A message that is
still the same action is replaced by the sampled action, so that the session continues with the tokens that were
sampled. Any other assistant message is a text like a user's message, and starts a new branch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_r1.core.messages import Message
from agent_r1.gateway.chat import Messages


@dataclass(frozen=True, slots=True)
class SentAction:
    """A sampled action that a client received.

    Attributes:
        before: the conversation before the action.
        sent: the message as the client received it.
        sampled: the message as it was sampled.
    """

    before: Messages
    sent: Message
    sampled: Message


def restore_sampled(messages: Messages, sent_actions: Sequence[SentAction]) -> Messages:
    """Return the conversation with each message that is a known action replaced by the sampled message.

    An action is known only after the same conversation. Tool messages refer to the ids of the sampled calls. If the
    same action was sampled several times, an action with the client's ids of calls is preferred, then the newest.
    """
    restored: list[Message] = []
    ids: dict[str, str] = {}
    for message in messages:
        if message.role == "assistant":
            known = _find(tuple(restored), message, sent_actions)
            if known is not None:
                ids |= {call.id: own.id for call, own in zip(message.calls, known.sampled.calls, strict=False)}
                message = known.sampled
        elif message.call_id is not None:
            message = replace(message, call_id=ids.get(message.call_id, message.call_id))
        restored.append(message)
    return tuple(restored)


def _find(before: Messages, message: Message, sent_actions: Sequence[SentAction]) -> SentAction | None:
    """Return the sent action that ``message`` repeats, after the conversation ``before``, or None."""
    same = [action for action in sent_actions if action.before == before and _is_same(message, action.sent)]
    if not same:
        return None
    ids = [call.id for call in message.calls]
    position = max(
        range(len(same)),
        key=lambda index: (
            [call.id for call in same[index].sent.calls] == ids,
            same[index].sent.text == message.text,
            index,
        ),
    )
    return same[position]


def _is_same(given: Message, sent: Message) -> bool:
    """Return whether two messages are the same action: equal words, and equal calls in the same order.

    Whitespace between words, ids of calls and the spelling of JSON do not count. Many clients send no reasoning back;
    if there is reasoning, it has to be equal.
    """
    if given.text.split() != sent.text.split() or len(given.calls) != len(sent.calls):
        return False
    if given.reasoning is not None and given.reasoning.split() != (sent.reasoning or "").split():
        return False
    pairs = zip(given.calls, sent.calls, strict=True)
    return all(a.name == b.name and _canonical(a.arguments) == _canonical(b.arguments) for a, b in pairs)


def _canonical(arguments: object) -> str:
    """Return JSON text that is equal for equal values; unlike ``==``, it distinguishes true from 1."""
    return json.dumps(arguments, sort_keys=True)

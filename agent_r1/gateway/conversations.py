"""Recognition of the policy's earlier actions in the conversations that clients send.

A client may change white space, ids of calls and the spelling of JSON. Recognized actions are replaced by the messages
that the policy sampled, so that the session continues the sampled tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_r1.core.messages import Message, Text
from agent_r1.gateway.chat import Messages


@dataclass(frozen=True, slots=True)
class SentAction:
    """A sampled action that was sent to the client.

    Attributes:
        before: the conversation before the action.
        sent: the message that the client received.
        sampled: the message as the policy sampled it.
    """

    before: Messages
    sent: Message
    sampled: Message


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
    """Return whether ``messages`` have an assistant message at the place of a sent action.

    The place of an action is after exactly the messages that preceded the action. The assistant message is not compared
    with the action. So the result is True for a changed answer, and also for an unchanged answer.

    Example: the policy answered "2+2?" with "4". The result is True for "2+2?", "4" and for "2+2?", "five". The result
    is False for "3+3?", "five".
    """
    return any(
        messages[: len(action.before)] == action.before
        and any(message.role == "assistant" for message in messages[len(action.before) :][:1])
        for action in sent_actions
    )


def _find(before: Messages, message: Message, sent_actions: Sequence[SentAction]) -> SentAction | None:
    """Return the action of the policy that the client sends back as ``message``, or None.

    ``before`` is the conversation before ``message``.
    """
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


def _continued(before: Messages, message: Message, sent_actions: Sequence[SentAction]) -> Message | None:
    """Replace the beginning of ``message`` by the exact text of a sampled action, and return the changed message.

    The client sends ``message`` after the conversation ``before``. The policy sampled the action after the same
    conversation. ``message`` must begin with the text of the action, but white space around the text can differ.

    If ``message`` or the action has calls or reasoning, the action does not fit. Return None if no action fits.

    Example: the policy sampled "\\n<search>Alba". The client sends "<search>Alba</search>", without the line break and
    with the stop string. The text of the result is "\\n<search>Alba</search>".
    """
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
    """Return whether a message from a client has the same words and calls as an action that was sent to the client.

    The argument ``given`` is the message, and ``sent`` is the action. Reasoning is compared only if the message has
    reasoning, because many clients do not send reasoning back.
    """
    if given.text.split() != sent.text.split() or len(given.calls) != len(sent.calls):
        return False
    if given.reasoning is not None and given.reasoning.split() != (sent.reasoning or "").split():
        return False
    pairs = zip(given.calls, sent.calls, strict=True)
    return all(a.name == b.name and _canonical(a.arguments) == _canonical(b.arguments) for a, b in pairs)


def _canonical(arguments: object) -> str:
    """Return the arguments of a call as JSON text. Unlike Python's ``==``, the text distinguishes true from 1."""
    return json.dumps(arguments, sort_keys=True)

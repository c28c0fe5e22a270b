"""Recognition of the policy's earlier actions in the conversations that clients send.

A client sends the whole conversation with each request. The client may have changed details of the assistant messages:
arguments of calls were parsed and written again, texts were stripped, calls got new ids.

- An assistant message that differs from an earlier action only in such details is replaced by the action as the policy
  sampled it. So the session continues with the sampled tokens.
- If an assistant message begins with the text of an earlier action, this text is replaced in the same way, and the text
  that the client added is kept.
- Any other assistant message is treated like a message of the user, and starts a new branch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_r1.core.messages import Message, Text
from agent_r1.gateway.chat import Messages


@dataclass(frozen=True, slots=True)
class SentAction:
    """A sampled action that was sent to the client as a message.

    Attributes:
        before: the conversation before the action.
        sent: the message that the client received.
        sampled: the message as the policy sampled it.
    """

    before: Messages
    sent: Message
    sampled: Message


def restore_sampled(messages: Messages, sent_actions: Sequence[SentAction]) -> Messages:
    """Return a copy of ``messages`` in which the actions of the policy have exactly the text that the policy sampled.

    A client receives each action of the policy as a message. In its next requests, the client sends this message back
    as a part of the conversation ``messages``, but can change white space, ids of calls, or the spelling of JSON.
    ``sent_actions`` are all actions that the client has received.

    - An assistant message repeats an action if two conditions hold. Apart from white space, ids of calls and the
      spelling of JSON, the message equals the action. The conversations before the message and before the action are
      equal.
    - A message that repeats an action is replaced by ``SentAction.sampled`` of this action.
    - If a message repeats several actions, one action is chosen in this order: an action with the call ids of the
      message, an action with exactly the text of the message, the newest action.
    - A message may also have additional text after the text of an action. Then only the text of the action is replaced,
      and the additional text is kept after it.
    - If a tool message answers a call of a replaced message, its ``call_id`` is changed to the id of this call in
      ``SentAction.sampled``.
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
    """Return whether ``messages`` have an assistant message at the place of an action that the client received.

    That is, ``messages`` begin with the conversation before this action, and the next message is an assistant message.
    Call this function only if ``messages`` start a new branch. Then the client has changed the action, or the
    tools of the request. This function compares neither of them.
    """
    return any(
        messages[: len(action.before)] == action.before
        and any(message.role == "assistant" for message in messages[len(action.before) :][:1])
        for action in sent_actions
    )


def _find(before: Messages, message: Message, sent_actions: Sequence[SentAction]) -> SentAction | None:
    """Return the sent action (an action that the client has received) that ``message`` repeats, or None.

    ``message`` repeats a sent action if both are the same (see :func:`_is_same`), and if the conversation before the
    action equals ``before``. If several sent actions match, :func:`restore_sampled` says which of them is returned.
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
    """Return the earlier action whose text is the beginning of ``message``, followed by the text that the client added.

    ``before`` is the conversation before ``message``, and must equal the conversation before the action. Whitespace
    around the text of the action is ignored. Return None if there is no such action, or if ``message`` has calls or
    reasoning.

    Example: the policy sampled "<search>Alba", and the client added the stop string. The message
    "<search>Alba</search>" then becomes the sampled action, followed by "</search>".
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
    """Return whether the message ``given`` in a client's request is the action ``sent`` that the client got before.

    They are the same if they have equal words, and equal calls in the same order. Differences in whitespace, in the ids
    of calls and in the spelling of JSON are ignored. The reasoning is compared only if ``given`` has reasoning, because
    many clients do not send reasoning back.
    """
    if given.text.split() != sent.text.split() or len(given.calls) != len(sent.calls):
        return False
    if given.reasoning is not None and given.reasoning.split() != (sent.reasoning or "").split():
        return False
    pairs = zip(given.calls, sent.calls, strict=True)
    return all(a.name == b.name and _canonical(a.arguments) == _canonical(b.arguments) for a, b in pairs)


def _canonical(arguments: object) -> str:
    """Return the arguments of a call as JSON text. Equal arguments give equal texts.

    Unlike Python's ``==``, these texts distinguish true from 1.
    """
    return json.dumps(arguments, sort_keys=True)

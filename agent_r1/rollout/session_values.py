"""Arguments and results of a session's methods."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.core.inference import Completion, PromptMedia
from agent_r1.core.messages import Action, Message
from agent_r1.core.tool import ToolSpec
from agent_r1.core.trajectory import Status, TurnKind, TurnTiming
from agent_r1.renderers.protocol import RenderedPrompt

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The result of a session if it has no action to return: the status of the attempt, and the reason."""

    status: Status
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SessionPrompt:
    """A prompt: the messages of a conversation, and the text and tokens that the policy gets.

    A prompt either continues an earlier turn of the session (the parent turn) or starts a new branch.

    Attributes:
        tools: the tools that the prompt describes.
        rendered: ``rendered.text`` is the text of the whole conversation. ``rendered.token_ids`` has only the tokens
            after the action of the parent turn. In a new branch, ``rendered.token_ids`` has all tokens.
        token_ids: the tokens of the whole conversation.
        parent: the index of the parent turn; None for a new branch.
        new_messages: the messages after the action of the parent turn. In a new branch, all messages.
        media: the images of the whole conversation, with the positions of their placeholder tokens in ``token_ids``.
    """

    messages: Messages
    tools: tuple[ToolSpec, ...]
    rendered: RenderedPrompt
    token_ids: tuple[int, ...]
    parent: int | None
    new_messages: Messages
    media: tuple[PromptMedia, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled action whose outcome is not known yet, with its prompt, tokens and timing."""

    prompt: SessionPrompt
    completion: Completion
    action: Action
    call_ends: tuple[int, ...]
    kind: TurnKind
    timing: TurnTiming

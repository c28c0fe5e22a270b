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
    """A conversation, with its text and its tokens as the policy sees them.

    The conversation continues an earlier turn, the parent turn, or starts a new branch.

    Attributes:
        tools: the tools that the prompt describes.
        rendered: the text of the conversation, and its tokens after the action of the parent turn.
        token_ids: all tokens of the conversation.
        parent: the index of the parent turn; None for a new branch.
        new_messages: the messages after the action of the parent turn. In a new branch, all messages.
        media: all images of the conversation, at their placeholder tokens in ``token_ids``.
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
    """A sampled action with its prompt, tokens and timing. Its outcome is not known yet."""

    prompt: SessionPrompt
    completion: Completion
    action: Action
    call_ends: tuple[int, ...]
    kind: TurnKind
    timing: TurnTiming

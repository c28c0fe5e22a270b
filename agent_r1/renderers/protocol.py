"""The contract between conversations and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agent_r1.core.inference import StopCondition
from agent_r1.core.messages import Action, Message
from agent_r1.core.tool import ToolSpec


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered conversation, up to the point where the assistant writes.

    Attributes:
        text: the whole conversation as text.
        token_ids: the tokens to add to the context: all of them for a new prompt, those after the last action for a
            bridge.

    Example:
        RenderedPrompt(text="...<|im_end|>\\n<|im_start|>user\\n...assistant\\n", token_ids=(198, 7, ...))
    """

    text: str
    token_ids: tuple[int, ...]


class Renderer(Protocol):
    """Converts messages to the tokens that a policy sees, and sampled tokens back to messages.

    Sampled tokens are never tokenized again: a turn continues with the tokens of :meth:`bridge_to_next_turn`.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an action. The first is the one that the template writes."""
        ...

    def stop_condition(self, tools: tuple[ToolSpec, ...]) -> StopCondition | None:
        """Return the condition by which text ends an action, or None if only tokens do."""
        ...

    def render(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = ()) -> RenderedPrompt:
        """Return the prompt for the assistant's next message. Raises UnsupportedChat if it cannot be rendered."""
        ...

    def bridge_to_next_turn(
        self,
        prompt: RenderedPrompt,
        messages: tuple[Message, ...],
        action: Action,
        action_ids: tuple[int, ...],
        observation: tuple[Message, ...],
        tools: tuple[ToolSpec, ...] = (),
    ) -> RenderedPrompt | None:
        """Return the prompt that follows an action, with the tokens after those sampled.

        Args:
            prompt: the prompt of the action, for ``messages``.
            messages: the conversation before the action.
            action: the action, parsed from ``action_ids``.
            action_ids: its sampled tokens, the end token included if one was sampled.
            observation: the messages that follow the action.
            tools: the tools that the prompt describes.

        Returns:
            None if the template changes earlier text. The next turn is then a new branch from :meth:`render`.
        """
        ...

    def parse(self, action_ids: tuple[int, ...], turn: int = 0, tools: tuple[ToolSpec, ...] = ()) -> Action:
        """Return the message that sampled tokens form. Never raises: a call that cannot be read has an ``error``."""
        ...

    def call_ends(self, action_ids: tuple[int, ...], tools: tuple[ToolSpec, ...] = ()) -> tuple[int, ...]:
        """Return, for each call of an action, the index of the token that completes it."""
        ...

    def action_length(self, sampled_ids: tuple[int, ...], tools: tuple[ToolSpec, ...]) -> int:
        """Return how many of the sampled tokens belong to the action."""
        ...

    def spoken_text(self, action: Action, tools: tuple[ToolSpec, ...]) -> str:
        """Return the text of an action without its reasoning and its calls."""
        ...

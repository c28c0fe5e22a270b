"""The interface of renderers. A renderer converts conversations to tokens, and converts sampled tokens to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_r1.core.inference import PromptMedia, StopCondition
from agent_r1.core.messages import Action, Image, Message, ToolSpec


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered conversation. It ends with the header of the assistant's next message."""

    text: str  # the text of the whole conversation
    # the tokens of the whole conversation. In a prompt of :meth:`Renderer.bridge_to_next_turn`, only the tokens after
    # the last action
    token_ids: tuple[int, ...]
    # the images, each with the positions of its placeholder tokens in ``token_ids``
    media: tuple[PromptMedia, ...] = ()


class ImageExpander(Protocol):
    """A converter of images to the placeholder tokens of a prompt.

    Attributes:
        placeholder: the special token that stands for an image. A chat template writes it once per image.
    """

    @property
    def placeholder(self) -> str: ...

    def expand(self, image: Image) -> str:
        """Return the text that replaces the placeholder of an image. Raise UnsupportedChat for a damaged image."""
        ...


class Renderer(Protocol):
    """A converter of messages to the tokens that a policy sees, and of sampled tokens to messages.

    Sampled tokens are never converted to text and tokenized again. The prompt of the next turn is the current prompt,
    the sampled tokens, and the tokens that :meth:`bridge_to_next_turn` returns.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an action, beginning with the end token that the template writes."""
        ...

    def stop_condition(self, tools: tuple[ToolSpec, ...]) -> StopCondition | None:
        """Return the condition that ends an action because of its text; None if only end tokens end an action."""
        ...

    def render(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = ()) -> RenderedPrompt:
        """Return the prompt for the assistant's next message. Raise UnsupportedChat if it cannot be rendered."""
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
        """Return the prompt for the turn after an action and its observation."""
        ...

    def parse(self, action_ids: tuple[int, ...], turn: int = 0, tools: tuple[ToolSpec, ...] = ()) -> Action:
        """Return the action in sampled tokens. Raise nothing: a call that cannot be read has an ``error``."""
        ...

    def parse_text(self, text: str, turn: int = 0, tools: tuple[ToolSpec, ...] = ()) -> Action:
        """Parse the text of sampled tokens, and return the action."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens as text, such as ``<|im_end|>``."""
        ...

    def call_ends(self, action_ids: tuple[int, ...], tools: tuple[ToolSpec, ...] = ()) -> tuple[int, ...]:
        """Return, for each tool call in an action, the index in ``action_ids`` of the token that completes the call."""
        ...

    def action_length(self, sampled_ids: tuple[int, ...], tools: tuple[ToolSpec, ...]) -> int:
        """Return how many tokens at the beginning of ``sampled_ids`` belong to the action."""
        ...

    def spoken_text(self, action: Action, tools: tuple[ToolSpec, ...]) -> str:
        """Return the text of an action without its reasoning and its calls."""
        ...

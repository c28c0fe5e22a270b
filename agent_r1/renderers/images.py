"""Images in rendered conversations: a mark in the text of a message, then the placeholder tokens of the image.

The text of a message with images goes through a tool format and a chat template. On this way, each image is a mark in
the text. The template gets the content as a list of texts and images, and writes a placeholder for each image. At the
end, the placeholder is replaced by as many placeholder tokens as the image has features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.inference import PromptMedia
from agent_r1.core.messages import Image, Message, Text
from agent_r1.renderers.protocol import ImageExpander, RenderedPrompt

MARK = "\uf8ff\ufffc\uf8ff"
"""Stands for an image in the text of a message. U+FFFC is Unicode's character for an embedded object."""


def mark_images(message: Message) -> Message:
    """Return the message with one text, in which a mark stands for each image."""
    if not message.images:
        return message
    text = "".join(part.text.replace(MARK, "") if isinstance(part, Text) else MARK for part in message.parts)
    return replace(message, parts=(Text(text),))


def without_images(message: Message) -> Message:
    """Return the message for a model without vision: an image in a tool result is a line of text.

    Raise UnsupportedChat if another message has an image, because the task would be another one without it.
    """
    if message.images and message.role != "tool":
        raise UnsupportedChat("the model has no vision: give it no images, or name a model with vision")
    return message.with_images_as_text()


def with_image_parts(message: Mapping[str, Any], always: bool) -> dict[str, Any]:
    """Return a message for a template, with its content as a list if it contains marks.

    With ``always``, the content is a list also if it is only text, as some templates of vision models require.

    Example:
        {"role": "user", "content": f"Look: {MARK}"} becomes
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}]}
    """
    content = message.get("content")
    if not isinstance(content, str) or (MARK not in content and not always):
        return dict(message)
    parts: list[dict[str, str]] = []
    for index, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] * bool(index) + [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts}


class PromptEncoder:
    """Converts rendered text to tokens, with the placeholder tokens of images.

    Args:
        tokenizer: the tokenizer.
        images: the tokens of images; None if the model has no vision.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: ImageExpander | None) -> None:
        self._tokenizer, self._images = tokenizer, images

    def prompt(self, text: str, end: str, messages: Sequence[Message]) -> RenderedPrompt:
        """Return the prompt of the conversation ``text``, with the tokens of its part ``end``.

        ``messages`` are the messages in this part.

        Raise UnsupportedChat if the text does not show all images of the messages, or cannot be encoded.
        """
        if self._images is None or not any(message.images for message in messages):
            return RenderedPrompt(text, self.encode(end))
        images = placeholders(messages, self._images.placeholder)
        expanded, counts = expand_placeholders(end, images, self._images)
        ids = self.encode(expanded)
        (token,) = self.encode(self._images.placeholder)
        return RenderedPrompt(text, ids, locate_images(ids, token, images, counts))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a rendered text. The text of a special token becomes the id of this token.

        Raise UnsupportedChat if the tokenizer cannot encode a part of the text.
        """
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
        except Exception as error:  # the tokenizers library raises Exception itself
            reason = " ".join(str(error).split())[:200]
            problem = f"the tokenizer cannot encode a conversation: {reason}"
            raise UnsupportedChat(f"{problem}; give it an unknown token that is in its vocabulary") from error


def placeholders(messages: Sequence[Message], placeholder: str) -> list[Image | None]:
    """Return, for each placeholder in the rendered text of ``messages``, its image.

    The result is None for a placeholder that the policy itself wrote: it is the text of an assistant message.
    """
    found: list[Image | None] = []
    for message in messages:
        if message.role == "assistant":
            written = "".join([message.reasoning or "", message.text, *(call.raw for call in message.calls)])
            found += [None] * written.count(placeholder)
        found += message.images
    return found


def expand_placeholders(text: str, images: Sequence[Image | None], expander: ImageExpander) -> tuple[str, list[int]]:
    """Replace the placeholder of each image in a rendered text by the placeholders of its features.

    Args:
        text: a rendered conversation, or a part of one.
        images: the image of each placeholder in ``text``, in order; None for text that the policy wrote.
        expander: knows the features of each image.

    Returns:
        The text, and the number of placeholders for each element of ``images``.

    Raises:
        UnsupportedChat: the text has another number of placeholders.
    """
    first, *rest = text.split(expander.placeholder)
    if len(rest) != len(images):
        raise UnsupportedChat(
            f"the chat template writes {len(rest)} of {len(images)} images; use a template that shows the images of "
            "all messages, or put them into user messages"
        )
    written = [expander.placeholder if image is None else expander.expand(image) for image in images]
    parts = (part for pair in zip(written, rest, strict=True) for part in pair)
    return "".join([first, *parts]), [one.count(expander.placeholder) for one in written]


def locate_images(
    ids: Sequence[int], token: int, images: Sequence[Image | None], counts: Sequence[int]
) -> tuple[PromptMedia, ...]:
    """Return the images at their placeholder tokens in ``ids``.

    Args:
        ids: the tokens of a text of :func:`expand_placeholders`.
        token: the placeholder token.
        images: the image of each placeholder before it was expanded.
        counts: the number of placeholder tokens of each of ``images``.
    """
    places = iter([index for index, one in enumerate(ids) if one == token])
    media = []
    for image, count in zip(images, counts, strict=True):
        indices = [next(places) for _ in range(count)]
        if image is not None:
            media.append(PromptMedia(image, tuple(_spans(indices))))
    return tuple(media)


def _spans(indices: Sequence[int]) -> Iterator[range]:
    """Yield ranges of consecutive indices. For example, 4 5 6 9 become range(4, 7) and range(9, 10)."""
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield range(indices[start], indices[end - 1] + 1)
            start = end

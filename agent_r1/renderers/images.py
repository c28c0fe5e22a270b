"""Convert conversations with images to tokens. In the tokens, an image is a sequence of equal placeholder tokens.

A placeholder token has a text, such as ``<|image_pad|>``. A message can contain the same text without an image. So the
conversion uses two random texts, which no message contains. MARK stands for an image. COPY stands for a placeholder
that was already in a message.

Example: a message says "No image: <|image_pad|>. Image: ", and then shows an image.

1. The image becomes MARK: "No image: <|image_pad|>. Image: MARK".
2. The placeholder in the text of the message becomes COPY: "No image: COPY. Image: MARK".
3. The text is divided at MARK into a list of texts and images: ["No image: COPY. Image: ", image]. From this list, the
   chat template writes a text with a placeholder for the image: "No image: COPY. Image: <|image_pad|>". Now each
   placeholder stands for an image.
4. Each placeholder becomes MARK. Then COPY becomes the placeholder: "No image: <|image_pad|>. Image: MARK". The result
   is called a marked text.
5. MARK becomes several placeholders: one for each feature vector that the model computes from the image.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.inference import PromptMedia
from agent_r1.core.messages import Image, Message, Text, join_parts
from agent_r1.renderers.chat_template import change_texts
from agent_r1.renderers.protocol import ImageExpander, RenderedPrompt


def _random_mark() -> str:
    return "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(16))


class PromptEncoder:
    """An encoder that prepares messages with images for a chat template, and converts rendered text to tokens.

    ``images`` is None if the model has no vision.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: ImageExpander | None) -> None:
        self._tokenizer, self._images = tokenizer, images
        self._mark, self._copy = _random_mark(), _random_mark()  # MARK and COPY of the module's docstring

    def mark_images(self, message: Message) -> Message:
        """Return the message with its content as one text, in which MARK stands for each image.

        If the model has no vision, an image in a tool result becomes a line of text, and any other image raises
        UnsupportedChat.
        """
        if not message.images:
            return message
        if self._images is None:
            if message.role != "tool":  # without the image, the task would be another one
                raise UnsupportedChat("the model has no vision: give it no images, or name a model with vision")
            return message.with_images_as_text()
        text = "".join(part.text if isinstance(part, Text) else self._mark for part in join_parts(message.parts))
        return replace(message, parts=(Text(text),))

    def with_image_parts(self, message: Mapping[str, Any], always: bool) -> dict[str, Any]:
        """Return ``message`` as a chat template expects it: content with images becomes a list of texts and images.

        If the argument ``always`` is true, content without an image also becomes a list, as some vision models require.
        A placeholder in a text of the message becomes COPY.
        """
        if self._images is None:
            return dict(message)
        placeholder, content = self._images.placeholder, message.get("content")
        if isinstance(content, str) and (self._mark in content or always):
            parts: list[dict[str, str]] = []
            for index, text in enumerate(content.split(self._mark)):
                parts += [{"type": "image"}] * bool(index) + [{"type": "text", "text": text}] * bool(text)
            message = {**message, "content": parts}
        return {
            name: change_texts(value, lambda text: text.replace(placeholder, self._copy))
            for name, value in message.items()
        }

    def marked(self, text: str) -> str:
        """Return the marked text: the output of a chat template, with MARK for each image."""
        if self._images is None:
            return text
        return text.replace(self._images.placeholder, self._mark).replace(self._copy, self._images.placeholder)

    def shown(self, marked: str) -> str:
        """Replace each MARK in a marked text by the placeholder of an image."""
        return marked if self._images is None else marked.replace(self._mark, self._images.placeholder)

    def prompt(
        self, marked: str, end: str, messages: Sequence[Message], earlier: Sequence[Message] = ()
    ) -> RenderedPrompt:
        """Return a prompt: its ``text`` is the whole conversation, its ``token_ids`` are only the tokens of ``end``.

        Args:
            marked: the marked text of the whole conversation.
            end: the last part of the conversation, with a placeholder for each image.
            messages: the messages in ``end``.
            earlier: the messages before ``end``.

        Raises:
            UnsupportedChat: ``messages`` contain images, and the chat template did not write each image of the
                conversation exactly once; or the tokenizer cannot encode ``end``.
        """
        images = [image for message in messages for image in message.images]
        if self._images is None or not images:
            return RenderedPrompt(self.shown(marked), self.encode(end))
        placeholder = self._images.placeholder
        count, written = sum(len(message.images) for message in earlier) + len(images), marked.count(self._mark)
        _, *rest = marked.rsplit(self._mark, len(images))
        tail = "".join(placeholder + text for text in rest)
        if written != count or not end.endswith(tail):
            raise UnsupportedChat(
                f"the chat template writes {written} of {count} images; use a template that shows the images of "
                "all messages once, or put them into user messages"
            )
        pieces = [end.removesuffix(tail)]  # texts and images alternate
        for image, text in zip(images, rest, strict=True):
            pieces += [self._images.expand(image), text]
        ids = self.encode("".join(pieces))
        (token,) = self.encode(placeholder)
        return RenderedPrompt(
            self.shown(marked), ids, _locate_images(ids, token, images, [piece.count(placeholder) for piece in pieces])
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a rendered text. The text of a special token becomes the id of this token.

        Raises UnsupportedChat if the tokenizer cannot encode a part of the text.
        """
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
        except Exception as error:  # the tokenizers library raises Exception itself
            reason = " ".join(str(error).split())[:200]
            problem = f"the tokenizer cannot encode a conversation: {reason}"
            raise UnsupportedChat(f"{problem}; give it an unknown token that is in its vocabulary") from error


def _locate_images(
    ids: Sequence[int], token: int, images: Sequence[Image], counts: Sequence[int]
) -> tuple[PromptMedia, ...]:
    # counts: the number of placeholders in each text and image, which alternate. Texts can contain placeholders, too.
    places = iter([index for index, one in enumerate(ids) if one == token])
    spans = [[next(places) for _ in range(count)] for count in counts]
    return tuple(PromptMedia(image, tuple(_spans(indices))) for image, indices in zip(images, spans[1::2], strict=True))


def _spans(indices: Sequence[int]) -> Iterator[range]:
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield range(indices[start], indices[end - 1] + 1)
            start = end

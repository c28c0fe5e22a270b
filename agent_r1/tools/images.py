"""Images in the results of tools: values of tool functions that are images, and images that cannot be decoded."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from agent_r1.core.images import decode_image
from agent_r1.core.messages import ContentPart, Image, Text


def image_parts(value: object) -> tuple[ContentPart, ...] | None:
    """Return the content parts of a value that a tool returned; None if the value contains no image.

    An image is an Image or an image of pillow. It can be in a list or a tuple, with other images and texts.

    Raises:
        InvalidInput: an image cannot be used.
    """
    values: Any = value if isinstance(value, list | tuple) else (value,)
    if not any(_is_image(one) for one in values) or not all(isinstance(one, str) or _is_image(one) for one in values):
        return None
    return tuple(Text(one) if isinstance(one, str) else _to_image(one) for one in values)


def check_images(parts: Iterable[ContentPart]) -> None:
    """Raise InvalidInput if an image cannot be decoded. Without pillow, no model reads images: check nothing."""
    if find_spec("PIL") is not None:
        for part in parts:
            if isinstance(part, Image):
                decode_image(part.data)


def _is_image(value: object) -> bool:
    return isinstance(value, Image) or _is_picture(value)


def _is_picture(value: object) -> bool:
    """Return whether a value is an image of pillow. If no code has imported pillow yet, return False."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _to_image(value: Any) -> Image:
    return Image.from_pil(value) if _is_picture(value) else value

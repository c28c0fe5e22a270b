"""Images in the embedded engine. The features of an image are stored while requests need the image.

A prompt has one placeholder token for each feature of an image. The engine replaces each placeholder token by a
negative number, which stands for one feature. Equal images get equal numbers. So the KV cache needs no knowledge of
images.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.core.inference import Prompt
from agent_r1.model.vision import (
    ImageFeatures,
    ImageProcessor,
    Pixels,
    compute_features,
    has_position_rows,
    position_rows,
)


@dataclass(slots=True)
class _Entry:
    """An image and its features. ``features`` is None until the features are computed.

    ``users`` is the number of unfinished requests that need the image.
    """

    pixels: Pixels
    features: ImageFeatures | None = None
    users: int = 0


class ImageCache:
    """The images of the requests of an engine.

    The event loop calls ``tokens``, ``release`` and ``drop_unused``. The thread of the engine calls ``read`` and
    ``on_new_weights``. Both call ``shift``.
    """

    def __init__(self, model: PreTrainedModel, processor: ImageProcessor) -> None:
        self._model, self._processor = model, processor
        self.has_position_rows = has_position_rows(model)
        self._first: dict[str, int] = {}  # sha256 -> number of the first feature; kept for the life of the engine
        self._size = 0
        self._entries: dict[str, _Entry] = {}
        self._shifts: dict[int, int] = {}  # token of the last feature of an image -> shift of the positions after it
        self._lock = threading.Lock()

    def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt, with a negative number instead of each placeholder token of an image.

        The images are kept until :meth:`release`. Raise UnsupportedChat if an image cannot be decoded.
        """
        pixels = [self._processor.pixels(one.image) for one in prompt.media]  # before anything is counted
        tokens = list(prompt.token_ids)
        with self._lock:
            for one, read in zip(prompt.media, pixels, strict=True):
                self._entries.setdefault(one.image.sha256, _Entry(read)).users += 1
                first = self._number(one.image.sha256, read)
                for feature, index in enumerate(one.indices):
                    tokens[index] = -1 - first - feature
        return tuple(tokens)

    def release(self, prompt: Prompt) -> None:
        with self._lock:
            for one in prompt.media:
                self._entries[one.image.sha256].users -= 1

    def drop_unused(self) -> None:
        """Drop the images that no unfinished request needs."""
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.users}

    def on_new_weights(self) -> None:
        with self._lock:
            for entry in self._entries.values():
                entry.features = None

    def shift(self, tokens: Sequence[int]) -> int:
        """Return the shift of the next token, which follows ``tokens``.

        The shift is the token's position in the model's position encoding, minus the token's index in the sequence. In
        some models, several tokens of an image have the same position. In other models, the shift is 0.
        """
        if not self.has_position_rows:
            return 0
        return sum(self._shifts[token] for token in tokens if token < 0 and token in self._shifts)

    def read(self, token_ids: Tensor, first: Tensor) -> tuple[Tensor, ImageFeatures, Tensor | None]:
        """Return what the model needs to read images in a pass: (index, features, positions).

        Args:
            token_ids: (R, T) the tokens of the pass. A negative number stands for a feature of an image.
            first: (R,) the position of the first token of each row (see ``position_rows`` in ``model.vision``).

        Returns:
            index: (R, T) the index of each token's feature in ``features``; -1 for tokens of text.
            features: the features of all images of the pass.
            positions: (3, R, T) the three positions of each token. None if the model has one position per token.
        """
        numbers = -1 - token_ids  # the number of a feature; negative for tokens of text
        index = torch.full_like(token_ids, -1)
        features, pixels, start = [], [], 0
        with self._lock:
            entries = [(self._first[key], entry) for key, entry in self._entries.items()]
        for number, entry in entries:
            is_own = (numbers >= number) & (numbers < number + entry.pixels.count)
            if not bool(is_own.any()):
                continue
            if entry.features is None:
                entry.features = compute_features(self._model.base_model, [entry.pixels])  # type: ignore[arg-type]
            index = torch.where(is_own, numbers - number + start, index)
            features.append(entry.features)
            pixels.append(entry.pixels)
            start += entry.pixels.count
        joined = ImageFeatures(
            torch.cat([one.embeddings for one in features]),
            tuple(torch.cat(layers) for layers in zip(*(one.deepstack for one in features), strict=True)),
        )
        return index, joined, position_rows(index, pixels, first) if self.has_position_rows else None

    def _number(self, key: str, pixels: Pixels) -> int:
        if key not in self._first:
            self._first[key] = self._size
            self._size += pixels.count
            self._shifts[-self._size] = pixels.shift  # the last feature has the number size - 1
        return self._first[key]

"""Models that read images: pixels, features that replace placeholder tokens, and three positions for each token.

A vision tower computes features of an image. A text decoder reads each feature instead of the embedding of a
placeholder token.

Models of the Qwen-VL family give each token three positions (time, height, width), which are equal for text tokens. The
features of an image form a grid of h rows and w columns. If the last token before the image has the position p - 1, the
feature in row r and column c has the positions (p, p + r, p + c). The next text token has the position p + max(h, w),
although the image has h * w tokens (arXiv:2409.12191, section 2.1).

Shapes: B rows of T tokens, k features of an image, F features of all images of a pass, hidden size H.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.core.errors import InvalidInput, UnsupportedChat, require_extra
from agent_r1.core.images import decode_image
from agent_r1.core.inference import PromptMedia
from agent_r1.core.messages import Image

GRID_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types whose images are one grid of features. Each token has three positions (time, height, width)."""

TILE_MODELS = ("idefics3", "smolvlm")
"""Model types that cut an image into tiles. Each token has one position."""

KEPT_BYTES = 2**28
"""Largest number of bytes of pixels that are kept for later uses. The newest image is always kept."""


def has_vision(config: PreTrainedConfig) -> bool:
    """Return whether this package supports reading images with a model of this configuration."""
    return config.model_type in GRID_MODELS + TILE_MODELS


def has_position_rows(model: PreTrainedModel) -> bool:
    """Return whether each token of a model has three positions (time, height, width) instead of one."""
    return model.config.model_type in GRID_MODELS


def text_decoder(backbone: PreTrainedModel) -> PreTrainedModel:
    """Return the part of ``backbone`` that reads token embeddings: ``backbone`` itself if it has no vision part."""
    return backbone.get_decoder() if has_vision(backbone.config) else backbone


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """An image as a vision tower reads it."""

    arguments: Mapping[str, Tensor]  # the arguments of ``get_image_features``, such as ``pixel_values``
    count: int  # k, the number of features that the vision tower computes for the image
    # the numbers (rows, columns) of features, if the model gives each token three positions; otherwise None
    grid: tuple[int, int] | None = None
    # the numbers (rows, columns) of tiles into which the image is cut; (0, 0) if the image is not cut
    tiles: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.arguments.values())

    @property
    def coordinates(self) -> Tensor:
        """The time (always 0), the row and the column of each feature: (3, k). All 0 for models with one position."""
        if self.grid is None:
            return torch.zeros((3, self.count), dtype=torch.long)
        features = torch.arange(self.count)
        return torch.stack([torch.zeros_like(features), features // self.grid[1], features % self.grid[1]])

    @property
    def shift(self) -> int:
        """The number that the image adds to (position - index) of every later token: 0 or negative."""
        return 0 if self.grid is None else max(self.grid) - self.count


class ImageProcessor:
    """The image processor of a model, which implements :class:`agent_r1.renderers.protocol.ImageExpander`.

    ``placeholder`` is the text of the placeholder token.
    """

    def __init__(self, processor: Any, config: PreTrainedConfig, placeholder: str) -> None:
        self._processor, self._config, self._placeholder = processor, config, placeholder
        self._kept: OrderedDict[str, Pixels] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    @property
    def placeholder(self) -> str:
        return self._placeholder

    def expand(self, image: Image) -> str:
        """Return the text that stands for ``image`` in a prompt: its placeholders, and marks of its tiles."""
        pixels = self.pixels(image)
        if self._config.model_type in GRID_MODELS:
            return self._placeholder * pixels.count
        rows, columns = pixels.tiles
        fake = "<fake_token_around_image>"
        tile = self._placeholder * (pixels.count // (rows * columns + 1))
        lines = (
            "".join(f"{fake}<row_{row}_col_{column}>{tile}" for column in _one_to(columns)) for row in _one_to(rows)
        )
        split = "".join(f"{line}\n" for line in lines) + "\n" if rows else ""
        return f"{split}{fake}<global-img>{tile}{fake}"

    def pixels(self, image: Image) -> Pixels:
        """Return the pixels of an image. Raise UnsupportedChat if the image cannot be decoded."""
        with self._lock:  # the engine, the renderer and the trainer are in different threads
            found = self._kept.pop(image.sha256, None)
            if found is None:
                found = self._read(image)
                self._size += found.nbytes
            self._kept[image.sha256] = found  # the newest one is at the end
            while len(self._kept) > 1 and self._size > KEPT_BYTES:
                self._size -= self._kept.popitem(last=False)[1].nbytes
        return found

    def save_pretrained(self, folder: Path) -> None:
        self._processor.save_pretrained(folder)

    def _read(self, image: Image) -> Pixels:
        try:
            if not image.data:
                raise ValueError("its bytes are in the run that recorded it")
            picture = decode_image(image.data)
            if self._config.model_type in GRID_MODELS:
                return self._grid(picture)
            return self._tiles(picture)
        except Exception as error:  # pillow and the processors raise many types of errors
            reason = " ".join(str(error).split())[:200]
            raise UnsupportedChat(f"the image {image} cannot be read: {reason}") from error

    def _grid(self, picture: Any) -> Pixels:
        made = self._processor([picture], return_tensors="pt")
        _, height, width = made["image_grid_thw"][0].tolist()
        merge = self._config.vision_config.spatial_merge_size
        grid = (height // merge, width // merge)
        arguments = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        return Pixels(arguments, grid[0] * grid[1], grid)

    def _tiles(self, picture: Any) -> Pixels:
        made = self._processor([picture], return_tensors="pt", return_row_col_info=True)
        rows, columns, vision = made["rows"][0][0], made["cols"][0][0], self._config.vision_config
        per_tile = (vision.image_size // vision.patch_size) ** 2 // self._config.scale_factor**2
        arguments = {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
        return Pixels(arguments, (int(rows) * int(columns) + 1) * per_tile, tiles=(int(rows), int(columns)))


def _one_to(last: int) -> range:
    return range(1, last + 1)


def load_image_processor(
    folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, own_code: bool = False
) -> ImageProcessor | None:
    """Return the image processor in the folder of a model; None if the model has no vision."""
    if not has_vision(config):
        return None
    require_extra("PIL", "images")
    try:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=own_code)
    except Exception as error:  # for a broken folder, transformers raises many types of errors
        do = f"put preprocessor_config.json beside the model's weights ({' '.join(str(error).split())[:160]})"
        raise InvalidInput("image processor", got=folder, do=do) from error
    placeholder = tokenizer.convert_ids_to_tokens(config.image_token_id)
    if not isinstance(placeholder, str):
        do = "correct image_token_id in config.json"
        raise InvalidInput("model", got=f"{folder}, whose tokenizer lacks token {config.image_token_id}", do=do)
    return ImageProcessor(processor, config, placeholder)


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """The features of one or more images: F features together, each a vector with the hidden size H."""

    embeddings: Tensor  # (F, H) the vectors that replace the embeddings of the placeholder tokens
    # one tensor (F, H) for each of the first layers of the decoder. The tensor is added to the output of the layer
    # (arXiv:2406.04334). () if none
    deepstack: tuple[Tensor, ...] = ()


def compute_features(backbone: PreTrainedModel, images: Sequence[Pixels]) -> ImageFeatures:
    """Return the features of one or more images, joined in the order of the images.

    Each image is computed separately, so that rounding errors do not depend on the other images.
    """
    parts = [_features_of(backbone, pixels) for pixels in images]
    return ImageFeatures(
        torch.cat([part.embeddings for part in parts]),
        tuple(torch.cat(layers) for layers in zip(*(part.deepstack for part in parts), strict=True)),
    )


def _features_of(backbone: Any, pixels: Pixels) -> ImageFeatures:
    arguments = {name: tensor.to(backbone.device) for name, tensor in pixels.arguments.items()}
    output = backbone.get_image_features(**arguments, return_dict=True)
    (embeddings,) = output.pooler_output
    if len(embeddings) != pixels.count:
        raise InvalidInput("image", got=f"{len(embeddings)} features instead of {pixels.count}", do="use another image")
    deepstack = output.get("deepstack_features", ())
    return ImageFeatures(embeddings, tuple(layer for (layer,) in deepstack))


def embed_with_images(decoder: PreTrainedModel, ids: Tensor, index: Tensor, features: ImageFeatures) -> dict[str, Any]:
    """Return the arguments of ``decoder`` for tokens (B, T). ``index`` (B, T) names their features; -1: text."""
    is_image = index >= 0  # (B, T)
    own = decoder.get_input_embeddings()(ids.masked_fill(is_image, 0))  # (B, T, H)
    read = features.embeddings.to(own.dtype)[index.clamp(min=0)]  # (B, T, H)
    arguments: dict[str, Any] = {"inputs_embeds": torch.where(is_image[..., None], read, own)}
    if features.deepstack:
        arguments["visual_pos_masks"] = is_image
        arguments["deepstack_visual_embeds"] = [layer[index[is_image]] for layer in features.deepstack]
    return arguments


def position_rows(index: Tensor, images: Sequence[Pixels], first: Tensor) -> Tensor:
    """Return the positions (time, height, width) of each token: (3, B, T), for B rows of T tokens.

    Args:
        index: (B, T) the index of the image feature that replaces the embedding of each placeholder token; -1 for
            tokens of text.
        images: the images, in the order of their features.
        first: (B,) one number for each row. If the first token of the row is text, the number is the position of this
            token. If the first token is feature i of an image, the number is i plus the position of the image's
            feature 0.
    """
    coordinates = torch.cat([pixels.coordinates for pixels in images], dim=1).to(index.device)  # (3, F)
    within = torch.cat([torch.arange(pixels.count) for pixels in images]).to(index.device)  # (F,) place in its image
    shifts = torch.zeros_like(within)
    shifts[torch.tensor([pixels.count for pixels in images]).cumsum(0) - 1] = torch.tensor(
        [pixels.shift for pixels in images], device=index.device
    )  # (F,) at the last feature of each image
    is_image, feature = index >= 0, index.clamp(min=0)
    shift = torch.where(is_image, shifts[feature], 0)  # (B, T)
    as_text = first[:, None] + torch.arange(index.shape[1], device=index.device) + shift.cumsum(1) - shift  # (B, T)
    in_grid = as_text - within[feature] + coordinates[:, feature]  # (3, B, T)
    return torch.where(is_image, in_grid, as_text)


@dataclass(frozen=True, slots=True, eq=False)
class PassImages:
    """The images of a forward pass over B rows of T tokens."""

    pixels: tuple[Pixels, ...]  # the images. An image that occurs several times is listed once
    # (B, T) the index of the image feature that replaces the embedding of each placeholder token; -1 for tokens of text
    index: Tensor
    # (3, B, T) the three position numbers of each token; None if the model uses one position number per token
    positions: Tensor | None

    @classmethod
    def of(
        cls, media: Sequence[Sequence[PromptMedia]], length: int, processor: ImageProcessor, device: torch.device
    ) -> PassImages | None:
        """Return the images of a pass over rows of ``length`` tokens, of which ``media`` holds the images; None if
        none.
        """
        distinct = {one.image.sha256: processor.pixels(one.image) for row in media for one in row}
        if not distinct:
            return None
        counts = [pixels.count for pixels in distinct.values()]
        first = dict(zip(distinct, [sum(counts[:number]) for number in range(len(counts))], strict=True))
        index = torch.full((len(media), length), -1)
        for number, row in enumerate(media):
            for one in row:
                start = first[one.image.sha256]
                index[number, one.indices] = torch.arange(start, start + distinct[one.image.sha256].count)
        pixels = tuple(distinct.values())
        has_rows = all(one.grid is not None for one in pixels)
        positions = position_rows(index, pixels, torch.zeros(len(media), dtype=torch.long)) if has_rows else None
        return cls(pixels, index.to(device), None if positions is None else positions.to(device))

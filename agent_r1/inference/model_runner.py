"""Forward passes of the embedded engine: prefill and decode of a transformers causal LM over the KV cache.

Shapes: R rows, T new tokens, L visible tokens (see ``inference.kv_cache``), V vocabulary size.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import ProductPrecision, Prompt
from agent_r1.inference.kv_cache import (
    ATTENTION,
    LENGTH_MULTIPLE,
    CacheBlock,
    CacheSlot,
    DecodeCache,
    PrefillCache,
    round_up,
)
from agent_r1.inference.native_decode import NativeDecoder
from agent_r1.model.vision import (
    ImageFeatures,
    ImageProcessor,
    Pixels,
    compute_features,
    embed_with_images,
    has_position_rows,
    position_rows,
    text_decoder,
)
from agent_r1.model.weights import product_precision


@dataclass(slots=True)
class _Entry:
    """An image, its features if they are computed, and the number ``users`` of unfinished requests that need it."""

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
        """Return the tokens of a prompt, with a negative number for each placeholder. Images are kept until release."""
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
        """Return the shift of the next token, which follows ``tokens``."""
        if not self.has_position_rows:
            return 0
        return sum(self._shifts[token] for token in tokens if token < 0 and token in self._shifts)

    def read(self, token_ids: Tensor, first: Tensor) -> tuple[Tensor, ImageFeatures, Tensor | None]:
        """Return what the model needs to read images in a pass of tokens (R, T): (index, features, positions).

        ``first`` (R,) has the position of the first token of each row. ``index`` (R, T) has the feature of each token,
        -1 for text. ``positions`` are (3, R, T), or None if the model has one position per token.
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


PREFILL_MULTIPLE = 16  # the number of new tokens in a prefill pass is padded to a multiple of this number


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """The largest sizes of a prefill pass, a forward pass that computes keys and values of new tokens."""

    # the largest number of tokens of one sequence in a pass. Longer prompts take several passes (chunked prefill)
    chunk: int
    tokens: int  # the largest number of tokens in a pass, including padding

    def rows(self, new: int, context: int) -> int:
        return max(1, min(self.tokens // new, MAX_PAIRS // (new * (new + context))))


MAX_PAIRS = 1 << 19
"""The largest number of pairs (new token, token to which the new token may attend) in a prefill pass of several
sequences. A pass of a single sequence may have more pairs."""

WIDE_PASS = PrefillShape(chunk=256, tokens=512)
"""For small models and for GPUs, where padding costs little."""

NARROW_PASS = PrefillShape(chunk=64, tokens=64)
"""For large models on a CPU, where each token of padding takes as long as any other token."""

NATIVE_PASS = 128  # tokens in a pass of the native decoder, whose results should fit into a processor's cache

LARGE_MODEL = 10_000_000
"""From this number of parameters on, a CPU takes ``NARROW_PASS``."""

PROBE_TOKENS = 24
PROBE_TOLERANCE: Mapping[ProductPrecision, float] = {"float32": 1e-3, "tf32": 2e-2, "bfloat16": 1e-1}
"""The largest accepted difference of logits with and without the KV cache, divided by the largest absolute logit."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A part of a sequence whose keys and values must be computed and written to the KV cache."""

    slot: CacheSlot  # the place of the sequence in the KV cache
    before: tuple[int, ...]  # all tokens before this part, which are already in the slot
    # the tokens of this part. A negative number stands for a feature of an image (:class:`ImageCache`)
    token_ids: tuple[int, ...]

    @property
    def cached(self) -> int:
        return len(self.before)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """The padded counts (new tokens, cached tokens): chunks that agree in them get bit-equal keys and values."""
        return round_up(len(self.token_ids), PREFILL_MULTIPLE), round_up(self.cached, LENGTH_MULTIPLE)


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """A request to copy the keys and values of a prefix from the slot ``source`` to the slot ``target``."""

    source: CacheSlot
    target: CacheSlot
    tokens: int  # the length of the prefix, in tokens
    start: int = 0  # the number of tokens that the target already holds. Their keys and values are not copied


class ModelRunner:
    """Makes the forward passes of a model over blocks of a KV cache. Not thread-safe.

    The runner takes ownership of the model, and replaces its attention by ``kv_cache.cache_attention``. ``native`` is
    the C++ code that computes the passes; None: PyTorch does. A new row has room for ``capacity`` tokens, and grows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        images: ImageCache | None = None,
        native: NativeDecoder | None = None,
        capacity: int = 2 * LENGTH_MULTIPLE,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self._decoder = text_decoder(model.base_model)  # type: ignore[arg-type]
        self._decoder.set_attn_implementation(ATTENTION)
        self._images, self._native = images, native
        self.rows, self._capacity = rows, capacity
        self.blocks: list[CacheBlock] = []
        is_large = model.device.type == "cpu" and model.num_parameters() >= LARGE_MODEL
        self.prefill_shape = NARROW_PASS if is_large or native is not None else WIDE_PASS

    def add_block(self) -> int:
        self.blocks.append(CacheBlock(self.rows, self._capacity, self.model.device))
        return len(self.blocks) - 1

    @torch.inference_mode()
    def empty(self, slots: Sequence[CacheSlot]) -> None:
        for slot in slots:
            self.blocks[slot.block].empty(slot.row)

    @torch.inference_mode()
    def copy_prefixes(self, copies: Sequence[PrefixCopy]) -> None:
        for copy in copies:
            source, target, columns = copy.source, copy.target, slice(copy.start, copy.tokens)
            origin, destination = self.blocks[source.block], self.blocks[target.block]
            destination.reserve(copy.tokens + 1)
            for index, (keys, values) in enumerate(zip(origin.keys, origin.values, strict=True)):
                target_keys, target_values = destination.layer(index, keys)
                target_keys[target.row, :, columns] = keys[source.row, :, columns]
                target_values[target.row, :, columns] = values[source.row, :, columns]
            destination.lengths[target.row] = copy.tokens

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Compute the keys and values of all chunks. A chunk replaces all tokens of its slot after ``before``."""
        if self._native is not None:
            return self._prefill_native(self._native, chunks)
        size, divided = self.prefill_shape.chunk, []
        for chunk in chunks:
            block, ids = self.blocks[chunk.slot.block], chunk.token_ids
            block.lengths[chunk.slot.row] = chunk.cached
            block.reserve(chunk.cached + len(ids) + 1)
            starts = range(0, len(ids), size)
            divided.append([PrefillChunk(chunk.slot, chunk.before + ids[:i], ids[i : i + size]) for i in starts])
        # The first portions of all chunks run before the second portions. Portions of equal padded shape run together.
        for portions in itertools.zip_longest(*divided):
            by_shape: dict[tuple[int, int], list[PrefillChunk]] = {}
            for portion in portions:
                if portion is not None:
                    by_shape.setdefault(portion.padded_shape, []).append(portion)
            for (new, context), equal in sorted(by_shape.items()):
                rows = self.prefill_shape.rows(new, context)
                for start in range(0, len(equal), rows):
                    self._prefill_pass(equal[start : start + rows], rows, new, context)

    def _prefill_native(self, native: NativeDecoder, chunks: Sequence[PrefillChunk]) -> None:
        by_block: dict[int, list[PrefillChunk]] = {}
        for chunk in chunks:
            by_block.setdefault(chunk.slot.block, []).append(chunk)
        for index, of_block in by_block.items():
            block = self.blocks[index]
            block.reserve(max(chunk.cached + len(chunk.token_ids) for chunk in of_block) + 1)
            tokens = [(token, c.slot.row, c.cached + i) for c in of_block for i, token in enumerate(c.token_ids)]
            for start in range(0, len(tokens), NATIVE_PASS):
                ids, rows, positions = torch.tensor(tokens[start : start + NATIVE_PASS]).T.contiguous()  # each (N,)
                native.append(ids, rows, positions, block)
            for chunk in of_block:
                block.lengths[chunk.slot.row] = chunk.cached + len(chunk.token_ids)

    def _prefill_pass(self, chunks: Sequence[PrefillChunk], rows: int, new: int, context: int) -> None:
        token_ids = torch.zeros((rows, new), dtype=torch.long)  # (R, T)
        cached = torch.zeros(rows, dtype=torch.long)  # (R,)
        for index, chunk in enumerate(chunks):
            token_ids[index, : len(chunk.token_ids)] = torch.tensor(chunk.token_ids)
            cached[index] = chunk.cached
        counts = [len(chunk.token_ids) for chunk in chunks]
        # Positions are clamped, because padding could get positions beyond the last position of the model.
        positions = (cached[:, None] + torch.arange(new)[None]).clamp(max=int(cached.max()) + max(counts) - 1)
        # Each token sees the cached tokens of its row and the new tokens up to itself: (R, T, context + T)
        seen = (torch.arange(context)[None] < cached[:, None])[:, None].expand(rows, new, context)
        causal = torch.ones((new, new), dtype=torch.bool).tril()[None].expand(rows, new, new)
        mask = self._additive_mask(torch.cat([seen, causal], dim=-1))[:, None]
        slots = [chunk.slot for chunk in chunks]
        cache = PrefillCache(self.blocks, slots, [chunk.cached for chunk in chunks], counts, context)
        if self._images is not None and bool((token_ids < 0).any()):
            self._prefill_images(chunks, token_ids, positions, mask, cache)
        else:
            shifts = torch.zeros(rows, dtype=torch.long)
            shifts[: len(chunks)] = torch.tensor([self._shift(chunk.before) for chunk in chunks])
            self._forward({"input_ids": token_ids.to(self.model.device)}, positions + shifts[:, None], mask, cache)
        for chunk, count in zip(chunks, counts, strict=True):
            self.blocks[chunk.slot.block].lengths[chunk.slot.row] = chunk.cached + count

    def _prefill_images(
        self, chunks: Sequence[PrefillChunk], token_ids: Tensor, positions: Tensor, mask: Tensor, cache: PrefillCache
    ) -> None:
        assert self._images is not None
        first = torch.zeros(len(token_ids), dtype=torch.long)  # (R,)
        first[: len(chunks)] = torch.tensor([chunk.cached + self._shift(chunk.before) for chunk in chunks])
        index, features, rows = self._images.read(token_ids, first)
        device = self.model.device
        read = embed_with_images(self._decoder, token_ids.clamp(min=0).to(device), index.to(device), features)
        self._forward(read, positions if rows is None else rows, mask, cache)

    def _shift(self, tokens: tuple[int, ...]) -> int:
        return 0 if self._images is None else self._images.shift(tokens)

    @torch.inference_mode()
    def decode(
        self, block_index: int, last_tokens: Mapping[int, int], shifts: Mapping[int, int] | None = None
    ) -> Tensor:
        """Run one decode step of a block, and return the fp32 logits of the next tokens: (running rows, V).

        Args:
            last_tokens: maps each running row to the last token of its sequence, which is added to the cache.
            shifts: maps a running row to what images add to its positions. Rows without images may be left out.
        """
        block = self.blocks[block_index]
        block.reserve(int(block.lengths.max()) + 1)
        rows, last = torch.tensor(list(last_tokens)), torch.tensor(list(last_tokens.values()))  # each (running rows,)
        if self._native is not None:
            logits = torch.empty(len(rows), self._native.vocabulary)
            self._native.append(last, rows, block.lengths[rows], block, logits)
            block.lengths[rows] += 1
            return logits
        token_ids = torch.zeros(self.rows, dtype=torch.long)  # (R,)
        token_ids[rows] = last
        visible = min(round_up(int(block.lengths.max()) + 1, LENGTH_MULTIPLE), block.capacity)
        # A row attends to its cached tokens and to the token that it appends, columns 0 .. length: (R, 1, 1, L)
        mask = self._additive_mask(torch.arange(visible)[None] <= block.lengths.cpu()[:, None])[:, None, None]
        positions = block.lengths.cpu().clone()
        for row, shift in (shifts or {}).items():
            positions[row] += shift
        read = {"input_ids": token_ids[:, None].to(self.model.device)}
        hidden = self._forward(read, positions[:, None], mask, DecodeCache(block, visible))[:, 0]
        logits = self.model.get_output_embeddings()(hidden)  # (R, V)
        rows = rows.to(self.model.device)
        block.lengths[rows] += 1
        return logits[rows].float()

    def _additive_mask(self, visible: Tensor) -> Tensor:
        zeros = torch.zeros(visible.shape, dtype=self.model.dtype)
        return zeros.masked_fill(~visible, float("-inf")).to(self.model.device)

    def _forward(self, read: Mapping[str, Any], positions: Tensor, mask: Tensor, cache: object) -> Tensor:
        return self._decoder(
            **read,
            position_ids=positions.to(self.model.device),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state


def probe_kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes that one token takes in the KV cache, measured by running the model on a short prompt."""
    decoder = text_decoder(model.base_model)  # type: ignore[arg-type]
    usual = decoder.config._attn_implementation
    token_ids = torch.arange(PROBE_TOKENS) % model.config.get_text_config().vocab_size
    with torch.inference_mode():
        expected = model(input_ids=token_ids[None].to(model.device), use_cache=False).logits[0, -1].float()
    runner = ModelRunner(model, 1)
    slot = CacheSlot(runner.add_block(), 0)
    try:
        runner.prefill([PrefillChunk(slot, (), tuple(token_ids[:-1].tolist()))])
        logits = runner.decode(0, {0: int(token_ids[-1])})[0]
    except Exception as error:  # models that need other methods of the cache raise many types of errors
        raise _unsupported(model, f"{type(error).__name__}: {error}") from error
    finally:
        decoder.set_attn_implementation(usual)
    if not bool(logits.isfinite().all() and expected.isfinite().all()):
        do = "use a model whose weights have an ordinary size: on a short prompt its logits are NaN or infinite"
        raise InvalidInput("model", got=type(model).__name__, do=do)
    tolerance = PROBE_TOLERANCE[product_precision("bfloat16" if model.dtype == torch.bfloat16 else "float32")]
    if not torch.allclose(logits, expected, rtol=0, atol=tolerance * float(expected.abs().max())):
        raise _unsupported(model, f"its logits differ by {float((logits - expected).abs().max()):.2g}")
    return runner.blocks[0].bytes_per_token


def _unsupported(model: PreTrainedModel, why: str) -> InvalidInput:
    do = f"use a model with plain causal attention; the embedded engine cannot run this one ({why})"
    return InvalidInput("model", got=type(model).__name__, do=do)

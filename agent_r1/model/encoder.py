"""Sentence encoders, which convert texts to vectors with the Euclidean norm 1. Any encoder model of transformers can be
used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.core.errors import InvalidInput
from agent_r1.model.folders import find_folder
from agent_r1.model.load import check_finite, check_folder, load_tokenizer, quiet_transformers
from agent_r1.model.weights import choose_device, tensors_checksum

POOLER = "pooler"
"""A part of the names of the pooler's weights, a layer after the last hidden state that sentence encoders do not
use."""

Pooling = Literal["mean", "cls"]

POOLING_FILE = Path("1_Pooling/config.json")
"""It declares how token vectors become the vector of a text, in the format of sentence-transformers."""


@dataclass(frozen=True, slots=True)
class SentenceEncoder:
    """An encoder model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pooling: Pooling
    max_tokens: int  # the maximum number of tokens of a text. The rest of a longer text is ignored
    batch: int  # the number of texts that are encoded at once

    @property
    def width(self) -> int:
        return int(self.model.config.hidden_size)

    def fingerprint(self) -> str:
        """Return a sha256 of all that determines the vectors."""
        # Leave out the pooler, which is not used. If the files lack its weights, they are random after every load.
        weights = tensors_checksum((name, each) for name, each in self.model.named_parameters() if POOLER not in name)
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        settings = f"{self.pooling}|{self.max_tokens}|{weights}|{vocabulary}"
        return hashlib.sha256(settings.encode()).hexdigest()

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return vectors (texts, width) of the norm 1; 0 for a text without tokens."""
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(order), self.batch):
            indices = order[start : start + self.batch]
            vectors[indices] = self._vectors([texts[index] for index in indices])
        return vectors

    def _vectors(self, texts: list[str]) -> np.ndarray:
        # Tokenizers fail on lone surrogates.
        valid = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        encoded: Any = self.tokenizer(
            valid, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self.model.device)
        mask = encoded["attention_mask"]
        nonempty = mask.any(1)
        vectors = torch.zeros((len(texts), self.width), device=self.model.device)
        if nonempty.any():
            hidden = self.model(
                input_ids=encoded["input_ids"][nonempty], attention_mask=mask[nonempty]
            ).last_hidden_state
            pooled = _mean(hidden, mask[nonempty]) if self.pooling == "mean" else hidden[:, 0]
            vectors[nonempty] = torch.nn.functional.normalize(pooled.float(), dim=-1)
        return vectors.cpu().numpy()


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def load_encoder(
    name: str, pooling: Literal["auto", "mean", "cls"], max_tokens: int, batch: int, device: str
) -> SentenceEncoder:
    """Load the encoder ``name`` (see :func:`agent_r1.model.folders.find_folder`)."""
    folder = find_folder(name, "encoder")
    tokenizer = load_tokenizer(name, "encoder")
    if tokenizer.pad_token is None:
        raise InvalidInput("encoder", got=name, do="name one whose tokenizer has a padding token")
    tokenizer.padding_side = "right"  # so that the first position holds the first token
    model = _load_model(folder, name).to(choose_device(device))  # type: ignore[arg-type]
    tokens = min(max_tokens, tokenizer.model_max_length, int(model.config.max_position_embeddings))
    return SentenceEncoder(model, tokenizer, _pooling(folder, pooling, name), tokens, batch)


def _load_model(folder: Path, name: str) -> PreTrainedModel:
    check_folder(folder, "encoder", name)
    try:
        with quiet_transformers():
            loaded: Any = AutoModel.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, use_safetensors=True, trust_remote_code=False
            )
    except Exception as error:  # for a broken folder, transformers, safetensors and json raise many types of errors
        line = str(error).strip().splitlines()[:1]
        raise InvalidInput(
            "encoder", got=name, do=f"name a complete encoder model; this one fails with: {line}"
        ) from error
    model, report = loaded
    missing = sorted(key for key in report["missing_keys"] if POOLER not in key)
    if missing:
        raise InvalidInput("encoder", got=name, do=f"add the weights that its files lack: {', '.join(missing[:3])} ..")
    check_finite(model, "encoder", name)
    return model.eval()


def _pooling(folder: Path, requested: Literal["auto", "mean", "cls"], name: str) -> Pooling:
    declared = _declared_pooling(folder / POOLING_FILE, name)
    if requested == "auto":
        return declared or "mean"
    if declared is not None and declared != requested:
        raise InvalidInput(
            "pooling", got=f"{requested!r} for {name}", do=f"use {declared!r}, as {POOLING_FILE} declares"
        )
    return requested


def _declared_pooling(file: Path, name: str) -> Pooling | None:
    if not file.is_file():
        return None
    settings = json.loads(file.read_text("utf-8"))
    for key, pooling in (("pooling_mode_cls_token", "cls"), ("pooling_mode_mean_tokens", "mean")):
        if settings.get(key):
            return pooling  # type: ignore[return-value]
    raise InvalidInput("encoder", got=f"{name}, which pools in another way", do="name one that pools by mean or cls")

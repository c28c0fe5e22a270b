"""Sentence encoders: texts to vectors of length 1, by any encoder model of transformers."""

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
from agent_r1.model.checksum import tensors_checksum
from agent_r1.model.load import find_folder, load_tokenizer, quiet

POOLER = "pooler"
"""What transformers call the layer after the last hidden state, which sentence encoders leave out."""

Pooling = Literal["mean", "cls"]

POOLING_FILE = Path("1_Pooling/config.json")
"""Where folders of the sentence-transformers library say how they pool."""


@dataclass(frozen=True, slots=True)
class SentenceEncoder:
    """A model that reads texts. ``batch`` texts are read together, at most ``max_tokens`` tokens of each."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pooling: Pooling
    max_tokens: int
    batch: int

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return int(self.model.config.hidden_size)

    def digest(self) -> str:
        """sha256 of all that a vector depends on: weights, tokenizer, pooling, length."""
        # A pooler is not used, and where the files have none its weights are drawn anew at every load.
        weights = tensors_checksum((name, each) for name, each in self.model.named_parameters() if POOLER not in name)
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        settings = f"{self.pooling}|{self.max_tokens}|{weights}|{vocabulary}"
        return hashlib.sha256(settings.encode()).hexdigest()

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 of shape (texts, width); rows have length 1, so that an inner product is the cosine.

        Texts of like length are read together; padding is masked, and changes rows by rounding only.
        """
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            vectors[chosen] = self._vectors([texts[index] for index in chosen])
        return vectors

    def _vectors(self, texts: list[str]) -> np.ndarray:
        """A text of which the tokenizer leaves nothing becomes 0: no model takes an empty sequence."""
        # No tokenizer takes lone surrogates.
        valid = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        read: Any = self.tokenizer(
            valid, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self.model.device)
        mask = read["attention_mask"]
        some = mask.any(1)
        vectors = torch.zeros((len(texts), self.width), device=self.model.device)
        if some.any():
            hidden = self.model(input_ids=read["input_ids"][some], attention_mask=mask[some]).last_hidden_state
            pooled = _mean(hidden, mask[some]) if self.pooling == "mean" else hidden[:, 0]
            vectors[some] = torch.nn.functional.normalize(pooled.float(), dim=-1)
        return vectors.cpu().numpy()


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(texts, tokens, width) -> (texts, width): the mean over real tokens."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def load_encoder(
    name: str, pooling: Literal["auto", "mean", "cls"], max_tokens: int, batch: int, device: str
) -> SentenceEncoder:
    """The encoder in folder ``name``, or of that name on the hub.

    Raises InvalidInput where there is none, its files are incomplete, it cannot pad, or its folder says that
    it pools otherwise than asked for.
    """
    folder = find_folder(name, "encoder")
    tokenizer = load_tokenizer(name)
    if tokenizer.pad_token is None:
        raise InvalidInput("encoder", got=name, do="name one whose tokenizer has a padding token")
    tokenizer.padding_side = "right"  # the first position is then the first token
    model = _load_model(folder, name).to(_device(device))  # type: ignore[arg-type]
    tokens = min(max_tokens, tokenizer.model_max_length, int(model.config.max_position_embeddings))
    return SentenceEncoder(model, tokenizer, _pooling(folder, pooling, name), tokens, batch)


def _load_model(folder: Path, name: str) -> PreTrainedModel:
    try:
        with quiet():
            loaded: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # transformers, safetensors and json each raise kinds of their own for a bad folder
        line = str(error).strip().splitlines()[:1]
        raise InvalidInput("encoder", got=name, do=f"name a complete encoder model; this one says: {line}") from error
    model, report = loaded
    missing = sorted(key for key in report["missing_keys"] if POOLER not in key)
    if missing:
        raise InvalidInput("encoder", got=name, do=f"add the weights that its files lack: {', '.join(missing[:3])} ..")
    return model.eval()


def _pooling(folder: Path, asked: Literal["auto", "mean", "cls"], name: str) -> Pooling:
    """What was asked for, if the folder does not contradict; what the folder says, if nothing was."""
    said = _said_pooling(folder / POOLING_FILE, name)
    if asked == "auto":
        return said or "mean"
    if said is not None and said != asked:
        raise InvalidInput("pooling", got=f"{asked!r} for {name}", do=f"use {said!r}: {POOLING_FILE} says so")
    return asked


def _said_pooling(file: Path, name: str) -> Pooling | None:
    if not file.is_file():
        return None
    settings = json.loads(file.read_text("utf-8"))
    for key, pooling in (("pooling_mode_cls_token", "cls"), ("pooling_mode_mean_tokens", "mean")):
        if settings.get(key):
            return pooling  # type: ignore[return-value]
    raise InvalidInput("encoder", got=f"{name}, which pools otherwise", do="name one that pools by mean or cls")


def _device(name: str) -> str:
    there = torch.cuda.is_available()
    if name.startswith("cuda") and not there:
        raise InvalidInput("device", got=name, do="use cpu or auto: torch sees no GPU on this machine")
    return ("cuda" if there else "cpu") if name == "auto" else name

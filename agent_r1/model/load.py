"""Open a causal language model or its tokenizer, by folder or by name on the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from agent_r1.core.errors import InvalidInput

HUB_SECONDS = 10.0
"""How long the hub may take to answer before it counts as not reachable."""

LOGIT_TOLERANCE = 1e-6
"""Largest difference, relative to the largest logit, for head(backbone(ids)) to count as the model's logits."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TOKENIZER_PIPELINE = ("normalizer", "pre_tokenizer", "decoder")


def load_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model in folder ``name``, or of that name on the hub, in eval mode.

    It stays in eval mode during training: dropout is switched off, because reinforcement learning
    needs the learner's probabilities to be the sampler's (a first ratio of 1).

    Raises InvalidInput where the folder or the hub's model is missing, broken, incomplete, not a
    causal language model, or computes its logits as anything but ``head(backbone(ids))``.
    """
    folder = find_folder(name, "model")
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except Exception as error:  # transformers, safetensors and json each raise kinds of their own for a bad folder
        raise _refused("model", name, error) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise InvalidInput("model", got=name, do=f"add the weights that its files lack: {', '.join(missing[:3])} ..")
    _check_logits(model, name)
    return model.eval()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in folder ``name``, or of that name on the hub. Raises InvalidInput where there is none."""
    folder = find_folder(name, "tokenizer")
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        # transformers would otherwise make an empty tokenizer from the model's configuration alone
        raise InvalidInput("tokenizer", got=name, do=f"name a folder with {' or '.join(TOKENIZER_FILES)}")
    try:
        with quiet():
            return _as_saved(AutoTokenizer.from_pretrained(folder), folder)
    except Exception as error:  # as many kinds as there are tokenizer formats
        raise _refused("tokenizer", name, error) from error


def load_stop_ids(name: str) -> tuple[int, ...]:
    """The tokens with which the model says that it ends: what its generation_config.json names, () without one."""
    folder = find_folder(name, "model")
    if not (folder / "generation_config.json").is_file():
        return ()
    try:
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    except Exception as error:  # a file that transformers cannot read
        raise _refused("generation_config.json", name, error) from error
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def _as_saved(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer as ``tokenizer.json`` describes it.

    For some model types (qwen2) transformers 5 builds the type's usual pipeline around the saved
    vocabulary, whatever the file says; text then splits otherwise than when the model was trained.
    """
    file = folder / "tokenizer.json"
    if not file.is_file() or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    saved, built = json.loads(file.read_text("utf-8")), json.loads(tokenizer.backend_tokenizer.to_str())
    if all(saved.get(part) == built.get(part) for part in TOKENIZER_PIPELINE):
        return tokenizer
    return PreTrainedTokenizerFast.from_pretrained(folder)


def find_folder(name: str, what: str) -> Path:
    """The local folder of that name, or the hub's files once they are on this machine."""
    if Path(name).exists():
        return Path(name)
    try:
        return Path(snapshot_download(name, etag_timeout=HUB_SECONDS, ignore_patterns=["*.bin", "*.pth", "*.gguf"]))
    except Exception as error:  # not a valid hub name, not on the hub, no access, no connection, no space
        do = f"name a folder that exists, or a model on the Hugging Face hub that can be reached ({_line(error)})"
        raise InvalidInput(what, got=name, do=do) from error


def _refused(what: str, name: str, error: Exception) -> InvalidInput:
    return InvalidInput(what, got=name, do=f"name a complete causal language model; this one says: {_line(error)}")


def _line(error: Exception) -> str:
    """The first line of an error, short enough for one line of ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' reports and progress bars: what goes wrong is said once, by our own error."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@torch.no_grad()
def _check_logits(model: PreTrainedModel, name: str) -> None:
    """The learner applies the head to action tokens only, so the logits must be nothing but the head's output."""
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    whole = model(input_ids=ids, use_cache=False).logits.float()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    parts = model.get_output_embeddings()(hidden).float()
    if whole.shape != parts.shape or (whole - parts).abs().max() > LOGIT_TOLERANCE * whole.abs().max():
        do = "use a model whose logits are its head's output: this one caps or scales them, which is not supported"
        raise InvalidInput("model", got=name, do=do)

"""Load a causal language model (with or without vision), its tokenizer, and its image processor."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from agent_r1.core.errors import InvalidInput
from agent_r1.model.adapter import ADAPTER_CONFIG, base_of, has_adapter, load_adapter, read_adapter
from agent_r1.model.folders import Kind, find_folder, first_line
from agent_r1.model.vision import ImageProcessor, has_vision, load_image_processor

LOGIT_TOLERANCE = 1e-6  # of the model's logits to ``head(backbone(ids))``, relative to the largest

WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TOKENIZER_PIPELINE = ("normalizer", "pre_tokenizer", "decoder")
TRIAL = "Hello, wörld! 東京 1.5\n"
"""A text that each loaded tokenizer encodes and decodes once, because a damaged one can fail only then."""


def load_model(name: str, dtype: torch.dtype, own_code: bool = False) -> PreTrainedModel:
    """Load a causal language model in eval mode, with or without an adapter, by its name or folder.

    Dropout is switched off, also in training, so that trainer and engine compute the same probabilities. Weights are
    read only from safetensors files, because loading a pickle can run code. Python code in the model's folder runs
    only if ``own_code`` is true.
    """
    folder = find_folder(name, "model")
    base = _find_base(folder)
    if base is not None:
        adapted = load_adapter(load_model(str(base), dtype, own_code), folder)
        check_finite(adapted, "adapter", name)
        return adapted
    check_folder(folder, "model", name)
    try:
        with quiet_transformers():
            reads_images = has_vision(AutoConfig.from_pretrained(folder, trust_remote_code=own_code))
            model_type = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
            loaded: Any = model_type.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, use_safetensors=True, trust_remote_code=own_code
            )
    except Exception as error:  # for a broken folder, transformers, safetensors and json raise many types of errors
        raise load_error("model", name, error) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise InvalidInput("model", got=name, do=f"add the weights that its files lack: {', '.join(missing[:3])} ..")
    check_finite(model, "model", name)
    _check_logits(model, name)
    return model.eval()


def read_weights(folder: Path, model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Return, by name, the weights that :func:`agent_r1.model.adapter.save_weights` wrote to ``folder``."""
    if has_adapter(model):
        return read_adapter(folder, model)
    own_code = type(model).__module__.startswith("transformers_modules")  # the code of this model runs already
    return load_model(str(folder), model.dtype, own_code).state_dict()


def load_tokenizer(name: str, kind: Kind = "model", own_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model or a sentence encoder."""
    folder = find_folder(name, kind)
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        folder = _find_base(folder) or folder
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        # Without these files, transformers would make an empty tokenizer from the model's configuration.
        raise InvalidInput("tokenizer", got=name, do=f"name a folder with {' or '.join(TOKENIZER_FILES)}")
    try:
        with quiet_transformers(), _panics_as_errors():
            tokenizer = _as_saved(AutoTokenizer.from_pretrained(folder, trust_remote_code=own_code), folder)
            with suppress(Exception):  # a tokenizer need not know every character
                tokenizer.decode(tokenizer(TRIAL).input_ids)
            template = folder / "chat_template.json"  # some models with vision have their template in this file only
            if not tokenizer.chat_template and template.is_file():
                tokenizer.chat_template = json.loads(template.read_text("utf-8"))["chat_template"]
            return tokenizer
    except Exception as error:  # each tokenizer format raises its own types of errors
        raise load_error("tokenizer", name, error) from error


def load_images(name: str, tokenizer: PreTrainedTokenizerBase, own_code: bool = False) -> ImageProcessor | None:
    """Return the image processor of a model; None if it has no vision."""
    folder = find_folder(name, "model")
    folder = _find_base(folder) or folder
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=own_code)
    except Exception as error:  # for a broken folder, transformers raises many types of errors
        raise load_error("model", name, error) from error
    with quiet_transformers():
        return load_image_processor(folder, config, tokenizer, own_code)


def load_stop_ids(name: str) -> tuple[int, ...]:
    """Return the ids of the end-of-sequence tokens in generation_config.json of a model; () if there are none."""
    folder = find_folder(name, "model")
    folder = _find_base(folder) or folder
    if not (folder / "generation_config.json").is_file():
        return ()
    try:
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    except Exception as error:  # transformers cannot read the file
        raise load_error("generation_config.json", name, error) from error
    tokens = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    if not all(type(token) is int for token in tokens):
        raise InvalidInput(
            "generation_config.json", got=f"eos_token_id {ends!r}", do="give a token or a list of tokens"
        )
    return tokens


def _as_saved(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    file = folder / "tokenizer.json"
    if not file.is_file() or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    saved, built = json.loads(file.read_text("utf-8")), json.loads(tokenizer.backend_tokenizer.to_str())
    if all(saved.get(part) == built.get(part) for part in TOKENIZER_PIPELINE):
        return tokenizer
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _find_base(folder: Path) -> Path | None:
    base = base_of(folder)
    if base is None:
        return None
    try:
        found = find_folder(base, "model")
    except InvalidInput as error:
        do = f"put it back, or correct base_model_name_or_path in {ADAPTER_CONFIG}"
        raise InvalidInput("adapter", got=f"{folder}, whose model {base} cannot be found", do=do) from error
    if base_of(found) is not None:
        raise InvalidInput("adapter", got=f"{folder}, whose model {base} is an adapter too", do="merge that one")
    return found


def check_finite(model: nn.Module, kind: str, name: str) -> None:
    """Raise InvalidInput about the ``kind`` ``name`` if a parameter or a buffer has a value that is NaN or infinite."""
    for tensor_name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            got = f"{name}, in which {tensor_name} has {count} values that are NaN or infinite"
            raise InvalidInput(kind, got=got, do="use weights that are finite, such as those of an earlier checkpoint")


def check_folder(folder: Path, kind: str, name: str) -> None:
    """Raise InvalidInput if loading weights from ``folder`` would run code of a repository or read other folders."""
    for file, keys in (("config.json", ("implementation", "transformers_weights")), (WEIGHTS_INDEX, ("weight_map",))):
        try:
            settings = json.loads((folder / file).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # there is none, or transformers says what is wrong
        for key, value in _texts(settings, ""):
            if "/" in value and any(part in key for part in keys):
                # transformers downloads and runs an attention that is called OWNER/REPOSITORY
                do = "remove it there: it leads out of the model's folder"
                raise InvalidInput(kind, got=f"{name}, whose {file} has {value!r} in {key}", do=do)


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for own, inner in value.items():
            yield from _texts(inner, f"{key}.{own}" if key else own)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    # A panic of the tokenizers library is no Exception, and writes a stack of many lines to standard error.
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            os.ftruncate(2, 0)
            raise ValueError(f"the tokenizers library panics: {error}") from None
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            os.write(2, written.read())


def load_error(kind: str, name: str, error: Exception) -> InvalidInput:
    """Return the error of one line for a model, tokenizer or processor that transformers cannot load."""
    if "trust_remote_code" in str(error):
        do = "use one that transformers supports"
        if kind in ("model", "tokenizer", "image processor"):
            do = f"read that code; if you trust it, give --own_code {name}"
        return InvalidInput(kind, got=f"{name}, which needs Python code of its own (auto_map)", do=do)
    do = f"name a complete causal language model; this one fails with: {first_line(error)}"
    return InvalidInput(kind, got=name, do=do)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off the log messages and progress bars of transformers in the ``with`` block."""
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
    # For a model that scales or caps the output of its head, training would compute wrong logits.
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    whole = model(input_ids=ids, use_cache=False).logits.float()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    parts = model.get_output_embeddings()(hidden).float()
    if not bool(whole.isfinite().all()):
        got = f"{name}, whose weights are finite and whose logits are not"
        raise InvalidInput("model", got=got, do="use weights of an ordinary size: a layer overflows in this dtype")
    if whole.shape != parts.shape or (whole - parts).abs().max() > LOGIT_TOLERANCE * whole.abs().max():
        do = "use a model whose logits are the output of its head: this one caps or scales them, which is not supported"
        raise InvalidInput("model", got=name, do=do)

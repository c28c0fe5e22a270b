"""A tiny model, its tokenizer, and checkpoints of it; runs of a few small steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpointing import TEMPLATE, make_model, snapshot_of
from resuming import Whole, train_with_images
from safetensors.torch import load_file
from scenarios import micro_taskset, unpredictable_taskset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agent_r1.core.files import Disk
from agent_r1.core.taskset import TaskSet
from agent_r1.store.manifest import checkpoint_step
from agent_r1.training import build
from agent_r1.training.checkpoint_files import BestStep, load_checkpoint, save_checkpoint


@pytest.fixture(autouse=True, scope="session")
def memory() -> Iterator[None]:
    with patch.object(build, "available_memory", lambda device: 64 * 2**30):
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"<unk>": 0, "alba": 1, "bruno": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def save(tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Path]:
    def saving(step: int, best: BestStep | None = None, keep: int = 2, disk: Disk | None = None) -> Path:
        return save_checkpoint(tmp_path, snapshot_of(step, model, best), model, tokenizer, keep, disk or Disk())

    return saving


@pytest.fixture
def holds(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Callable[[Path], bool]:
    def compare(folder: Path) -> bool:
        wanted, found = snapshot_of(checkpoint_step(folder), model), load_checkpoint(folder, model, tokenizer)
        loaded = load_file(folder / "model.safetensors")
        same = all(torch.equal(tensor, loaded[name]) for name, tensor in wanted.weights.items())
        moments = all(torch.equal(t, found.trainer.tensors[name]) for name, t in wanted.trainer.tensors.items())
        scalars = found.trainer.scalars == wanted.trainer.scalars and found.progress.step == wanted.progress.step
        return same and moments and scalars and found.trainer.tensors.keys() == wanted.trainer.tensors.keys()

    return compare


@pytest.fixture(scope="session")
def micro() -> TaskSet:
    return micro_taskset()


@pytest.fixture(scope="session")
def whole(micro: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Whole]:
    runs: dict[str, Whole] = {}

    def get(unpredictable: bool = False, **settings: Any) -> Whole:
        if (key := repr((unpredictable, settings))) not in runs:
            its = unpredictable_taskset() if unpredictable else micro
            place = tmp_path_factory.mktemp("whole")
            runs[key] = Whole(its, place, train_with_images(its, place, settings))
        return runs[key]

    return get

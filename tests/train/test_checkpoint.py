"""Models and learner states on disk: whole or absent, and every change to them is seen."""

import hashlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agent_r1.core.errors import InvalidInput
from agent_r1.learn.learner import LearnerState
from agent_r1.train import checkpoint
from agent_r1.train.checkpoint import (
    CheckpointError,
    check_manifest,
    checkpoints,
    load_learner_state,
    save_checkpoint,
    save_model,
    trained_model,
)

STATE = LearnerState(
    {"optimizer.step": torch.tensor(3.0), "critic.head": torch.randn(4, 2)}, {"step": 3, "policy": "ab"}
)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=8, num_attention_heads=2, num_key_value_heads=1, **sizes))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"<unk>": 0, "alba": 1, "bruno": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def save(tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Callable[[int], Path]:
    """``save(step)`` writes a checkpoint of the run ``tmp_path``, keeping two."""
    return lambda step: save_checkpoint(tmp_path, step, model, tokenizer, STATE, keep=2)


def test_transformers_loads_a_saved_model_with_its_template(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = save_model(tmp_path, model, tokenizer)
    assert folder == tmp_path / "model" and check_manifest(folder) == ()
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())
    again = AutoTokenizer.from_pretrained(folder)
    assert again.apply_chat_template([{"role": "user", "content": "alba"}], tokenize=False) == "alba"
    assert again("alba bruno").input_ids == [1, 2]


def test_a_checkpoint_is_a_model_and_a_learner_state(save: Callable[[int], Path]) -> None:
    folder = save(3)
    assert folder.name == "step-3" and AutoModelForCausalLM.from_pretrained(folder) is not None
    state = load_learner_state(folder)
    assert state.scalars == STATE.scalars and state.tensors.keys() == STATE.tensors.keys()
    assert all(torch.equal(tensor, STATE.tensors[name]) for name, tensor in state.tensors.items())


def test_nothing_saved_is_a_pickle(save: Callable[[int], Path]) -> None:
    kinds = {path.suffix for path in save(1).rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".jinja"}


def test_the_manifest_names_every_file_with_size_and_hash(save: Callable[[int], Path]) -> None:
    folder = save(1)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    for name, entry in listed.items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "learner.safetensors has changed": lambda folder: flip(folder / "learner.safetensors"),
    "model.safetensors has changed": lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
    "config.json is missing": lambda folder: (folder / "config.json").unlink(),
    "pytorch_model.bin is not in the manifest": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"code"),
    "manifest.json cannot be read: FileNotFoundError": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json cannot be read: JSONDecodeError": lambda folder: (folder / "manifest.json").write_text("{"),
    "manifest.json cannot be read: KeyError": lambda folder: (folder / "manifest.json").write_text("{}"),
    "manifest.json cannot be read: ValueError('format 2": lambda folder: (folder / "manifest.json").write_text(
        '{"format": 2, "files": {}}'
    ),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_damage_is_named_and_never_loaded(problem: str, save: Callable[[int], Path]) -> None:
    folder = save(1)
    DAMAGE[problem](folder)
    [found] = check_manifest(folder)
    assert found.startswith(problem)
    with pytest.raises(InvalidInput, match="use another checkpoint"):
        load_learner_state(folder)


def test_every_byte_of_every_file_counts(save: Callable[[int], Path]) -> None:
    folder = save(1)
    for file in sorted(folder.iterdir()):
        if file.name != "manifest.json":
            flip(file)
            assert check_manifest(folder) == (f"{file.name} has changed",)
            flip(file)
    assert check_manifest(folder) == ()


def test_the_newest_two_are_kept(save: Callable[[int], Path], tmp_path: Path) -> None:
    for step in (2, 5, 10, 100):
        save(step)
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-100", "step-10"]


def test_a_damaged_checkpoint_does_not_count_as_kept(save: Callable[[int], Path], tmp_path: Path) -> None:
    save(1)
    (save(2) / "model.safetensors").write_bytes(b"short")
    save(3)
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-3", "step-2", "step-1"]


@pytest.mark.parametrize(
    ("place", "error"),
    [("save_file", SafetensorError("No space left on device")), ("_entry", OSError(28, "No space left on device"))],
)
def test_a_failing_save_leaves_what_was_there(
    place: str, error: Exception, save: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    save(1), save(2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, place, fail)
        with pytest.raises(CheckpointError, match=r"step-3 could not be written: .*No space left"):
            save(3)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-1", "step-2"]
    assert [check_manifest(folder) for folder in checkpoints(tmp_path)] == [(), ()]
    assert save(3).name == "step-3"


STEPS_OF_A_SAVE = ("fsync", "rename", "rmdir", "unlink")


def killed_at(call: int, save: Callable[[int], Path]) -> bool:
    """Save step 2 in a process that dies right before its ``call``-th disk operation; False where it outlived them."""

    def dying(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **settings: object) -> object:
            nonlocal call
            call -= 1
            if call == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **settings)

        return counted

    child = os.fork()
    if child == 0:
        for name in STEPS_OF_A_SAVE:
            setattr(os, name, dying(getattr(os, name)))
        save(2)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_before_any_disk_operation_a_whole_checkpoint_is_there(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    def save(step: int) -> Path:
        return save_checkpoint(tmp_path, step, model, tokenizer, STATE, keep=1)

    seen = set()
    for call in itertools.count(1):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        save(1)
        died = killed_at(call, save)
        left = checkpoints(tmp_path)
        assert left and all(check_manifest(folder) == () for folder in left)
        seen.add(tuple(folder.name for folder in left))
        assert save(3).name == "step-3"
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]
        if not died:
            break
    assert call > 10 and seen == {("step-1",), ("step-2", "step-1"), ("step-2",)}


def test_the_model_of_a_run_is_its_final_one_or_its_newest_whole_checkpoint(
    save: Callable[[int], Path], tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(InvalidInput, match="which has saved no whole model; let it train"):
        trained_model(tmp_path)
    older, newer = save(1), save(2)
    assert trained_model(tmp_path) == newer
    flip(newer / "model.safetensors")
    assert trained_model(tmp_path) == older
    assert trained_model(tmp_path) != save_model(tmp_path, model, tokenizer) == trained_model(tmp_path)

"""Saved models and checkpoints load unchanged, and every change to their files is detected."""

import errno
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import TEMPLATE, make_model, snapshot_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from agent_r1.core.errors import InvalidInput
from agent_r1.store.manifest import (
    MANIFEST_FORMAT,
    CorruptCheckpoint,
    check_manifest,
    checkpoint_step,
    list_checkpoints,
)
from agent_r1.training.checkpoint_files import (
    BestStep,
    TrainProgress,
    find_latest_checkpoint,
    load_checkpoint,
    quarantine,
    save_checkpoint,
    save_model,
    weights_on_cpu,
)


def test_transformers_loads_a_saved_model_with_its_template(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = save_model(tmp_path, model, tokenizer)
    assert folder == tmp_path / "model" and check_manifest(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())
    again = AutoTokenizer.from_pretrained(folder)
    assert again.apply_chat_template([{"role": "user", "content": "alba"}], tokenize=False) == "alba"
    assert again("alba bruno").input_ids == [1, 2]


def test_the_progress_is_restored(
    save: Callable[..., Path], model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    best = BestStep(1, 0.1 + 0.2)
    assert load_checkpoint(save(3, best), model, tokenizer).progress == TrainProgress(3, best=best)
    assert load_checkpoint(save(4), model, tokenizer).progress == TrainProgress(4)


def test_tied_weights_stay_tied_and_are_written_once(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    tied = make_model(tie_word_embeddings=True)
    weights = weights_on_cpu(tied)
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    snapshot = replace(snapshot_of(1, tied), weights=weights)
    saved = save_checkpoint(tmp_path, snapshot, tied, tokenizer, 2) / "model.safetensors"
    tied.save_pretrained(tmp_path / "plain")
    assert saved.read_bytes() == (tmp_path / "plain" / "model.safetensors").read_bytes()


def test_a_snapshot_does_not_change_with_the_model(model: PreTrainedModel) -> None:
    moving = make_model()
    taken = weights_on_cpu(moving)
    with torch.no_grad():
        for parameter in moving.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensor, taken[name]) for name, tensor in model.state_dict().items())


def test_nothing_saved_is_a_pickle(save: Callable[..., Path]) -> None:
    kinds = {path.suffix for path in save(1).rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".jinja"}


def test_the_manifest_names_every_file_with_size_and_hash(save: Callable[..., Path]) -> None:
    folder = save(1)
    listed = json.loads((folder / "manifest.json").read_text("utf-8"))["files"]
    assert set(listed) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    for name, entry in listed.items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


CORRUPTIONS: dict[str, Callable[[Path], object]] = {
    "holds a trainer.safetensors that has changed": lambda folder: flip(folder / "trainer.safetensors"),
    "holds a model.safetensors that has changed": lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
    "holds pytorch_model.bin, which is not in its": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"code"),
    "no readable manifest: FileNotFoundError": lambda folder: (folder / "manifest.json").unlink(),
    "no readable manifest: KeyError": lambda folder: (folder / "manifest.json").write_text("{}", "utf-8"),
    "no readable manifest: TypeError": lambda folder: edit(folder, extra=1),
}


def edit(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}), "utf-8")


@pytest.mark.parametrize("problem", CORRUPTIONS)
def test_a_corrupt_checkpoint_is_reported_and_never_loaded(
    problem: str,
    save: Callable[..., Path],
    tmp_path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    older, newer = save(1), save(2)
    CORRUPTIONS[problem](newer)
    with pytest.raises(InvalidInput, match=f"{problem}.*; use another checkpoint"):
        load_checkpoint(newer, model, tokenizer)
    found = find_latest_checkpoint(tmp_path)
    [skipped] = found.skipped
    assert found.folder == older and skipped.folder == newer and problem in skipped.reason


@pytest.mark.parametrize(("other", "age"), [(MANIFEST_FORMAT + 1, "newer")])
def test_a_checkpoint_of_another_format_is_refused_not_skipped(
    other: int, age: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    save(1)
    edit(save(2), format=other)
    with pytest.raises(InvalidInput, match=f"step-2 of format {other}, which is {age}; use the agent-r1 that wrote it"):
        find_latest_checkpoint(tmp_path)


def test_hidden_files_are_ignored(save: Callable[..., Path], tmp_path: Path, holds: Callable[[Path], bool]) -> None:
    for name in (".DS_Store", ".nfs0001"):
        (save(1) / name).write_text("left by a file manager", "utf-8")
        assert find_latest_checkpoint(tmp_path).skipped == () and holds(tmp_path / "checkpoints" / "step-1")


def test_a_checkpoint_with_an_unreadable_file_is_corrupt(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = save(1), save(2)
    read = Path.open

    def failing(self: Path, *arguments: Any, **named: Any) -> Any:
        if self == newer / "model.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return read(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", failing)
    found = find_latest_checkpoint(tmp_path)
    assert found.folder == older and "model.safetensors that cannot be read: [Errno 5]" in found.skipped[0].reason


def test_a_quarantined_checkpoint_no_longer_counts_and_is_never_overwritten(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    names = [quarantine(save(2)).name for _ in range(3)]
    assert names == ["corrupt-step-2", "corrupt1-step-2", "corrupt2-step-2"] and list_checkpoints(tmp_path) == []
    save(3)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {*names, "step-3"}


def test_a_checkpoint_of_another_model_tokenizer_or_template_is_refused(
    save: Callable[..., Path], model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = save(1)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0})), unk_token="<unk>")
    words.chat_template = TEMPLATE
    again = AutoTokenizer.from_pretrained(folder)
    again.chat_template = TEMPLATE + " "
    others = {
        "another model": (make_model(rope_theta=123.0), tokenizer),
        "another model; continue": (make_model(intermediate_size=16), tokenizer),
        "another tokenizer": (model, words),
        "another chat template": (model, again),
    }
    for what, (one, other) in others.items():
        with pytest.raises(InvalidInput, match=f"which has {what}"):
            load_checkpoint(folder, one, other)


def test_a_model_loaded_from_its_checkpoint_has_the_same_fingerprint(save: Callable[..., Path]) -> None:
    folder = save(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer(["alba", "bruno alba"], padding=False, truncation=True, max_length=1)
    assert load_checkpoint(folder, model, tokenizer).progress.step == 1


def test_a_changed_bit_of_any_file_is_detected(save: Callable[..., Path]) -> None:
    folder = save(1)
    for file in sorted(folder.iterdir()):
        if file.name != "manifest.json":
            flip(file)
            with pytest.raises(CorruptCheckpoint, match=f"holds a {file.name} that has changed"):
                check_manifest(folder)
            flip(file)
    assert check_manifest(folder)


def test_a_corrupt_checkpoint_does_not_count_as_kept(save: Callable[..., Path], tmp_path: Path) -> None:
    save(1)
    (save(2) / "model.safetensors").write_bytes(b"short")
    save(3)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step-3", "step-1"]


def test_the_best_checkpoint_is_kept_beside_the_newest(save: Callable[..., Path], tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 6)):
        save(step, BestStep(best, 0.5), keep=2)
        kept = {checkpoint_step(folder) for folder in list_checkpoints(tmp_path)}
        assert kept == {best, step, max(1, step - 1)} | (
            {2} if step == 6 else set()
        )  # step 2 is the best step of checkpoint 5


def test_a_checkpoint_replaces_a_corrupt_one(
    save: Callable[..., Path], tmp_path: Path, holds: Callable[[Path], bool]
) -> None:
    flip(save(2) / "model.safetensors")
    assert holds(save(2)) and [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]

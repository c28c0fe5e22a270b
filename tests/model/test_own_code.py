"""A model's folder runs no code of its own unless it is named, reads no other folder, and a damaged tokenizer is an
error of one line."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_base import GOLDEN_BASE

from agent_r1.core.errors import InvalidInput
from agent_r1.model.encoder import load_encoder
from agent_r1.model.load import load_images, load_model, load_tokenizer
from agent_r1.model.value_head import HEAD_FILE, load_value_model

ROOT = Path(__file__).parents[2]
CODE_FREE = ("GenerationConfig", "PreTrainedTokenizerFast", "LlamaForCausalLM", "peft.PeftConfig")
"""Classes of transformers and peft that read a folder without looking for code in it."""


def trusting(source: str) -> list[str]:
    """Return the calls of loaders in ``source`` that do not say whether code of the folder may run."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loaders = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"]
    return [
        ast.unparse(call)
        for call in loaders
        if ast.unparse(call.func.value) not in CODE_FREE  # type: ignore[attr-defined]
        and not any(each.arg == "trust_remote_code" for each in call.keywords)
    ]


def test_every_loader_says_whether_code_may_run() -> None:
    files = [
        file for room in ("agent_r1", "environments", "research", "benchmarks") for file in ROOT.glob(f"{room}/**/*.py")
    ]
    found = {str(file): calls for file in files if (calls := trusting(file.read_text("utf-8")))}
    assert found == {}
    assert trusting("AutoModel.from_pretrained(x)\ny().from_pretrained(x, dtype=z)") != []


PLANTED = "from pathlib import Path\nPath({mark!r}).touch()\nraise SystemExit(3)\n"


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text("utf-8")) if file.exists() else {}
    change(data)
    file.write_text(json.dumps(data), "utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN_BASE, tmp_path / "model")
    (tmp_path / "model" / "code.py").write_text(PLANTED.format(mark=str(tmp_path / "ran")), "utf-8")
    return tmp_path / "model"


def own_model(folder: Path) -> None:
    maps = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoModel": "code.Model"}
    edit(folder / "config.json", lambda data: data.update(model_type="planted", auto_map=maps))


def own_tokenizer(folder: Path) -> None:
    maps = {"AutoTokenizer": ["code.Slow", "code.Fast"]}
    edit(folder / "tokenizer_config.json", lambda data: data.update(auto_map=maps, tokenizer_class="Planted"))


@pytest.mark.parametrize(
    ("plant", "load"),
    [
        (own_model, lambda name: load_model(name, torch.float32)),
        (own_tokenizer, load_tokenizer),
        (own_model, lambda name: load_images(name, load_tokenizer(str(GOLDEN_BASE)))),
        (own_model, lambda name: load_encoder(name, "mean", 8, 1, "cpu")),
        (own_model, lambda name: load_value_model(Path(name), torch.float32)),
    ],
)
def test_code_of_a_model_does_not_run_and_the_error_says_how_to_allow_it(
    plant: Callable[[Path], None], load: Callable[[str], object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(folder)
    shutil.copy(folder / "model.safetensors", folder / HEAD_FILE)
    monkeypatch.setattr("builtins.input", lambda question="": "y")
    with pytest.raises(InvalidInput) as caught:
        load(str(folder))
    assert not (folder.parent / "ran").exists()
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_code_of_a_named_model_runs(folder: Path) -> None:
    own_tokenizer(folder)
    with pytest.raises(InvalidInput, match=f"read that code; if you trust it, give --own_code {folder}"):
        load_tokenizer(str(folder))
    with pytest.raises(SystemExit):
        load_tokenizer(str(folder), own_code=True)
    assert (folder.parent / "ran").exists()


@pytest.mark.parametrize("value", ["owner/kernel", "owner/kernel@main:attend", {"text_config": "owner/kernel"}])
@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
def test_an_attention_of_a_repository_is_refused(key: str, value: object, folder: Path) -> None:
    edit(folder / "config.json", lambda data: data.update({key: value}))
    with pytest.raises(InvalidInput, match="owner/kernel"):
        load_model(str(folder), torch.float32)


@pytest.mark.parametrize(
    "place", ["../other/model.safetensors", "sub/../../other/model.safetensors", "{here}/other/model.safetensors"]
)
def test_weights_outside_the_folder_are_refused(place: str, folder: Path) -> None:
    (folder.parent / "other").mkdir()
    (folder / "sub").mkdir()
    shutil.move(folder / "model.safetensors", folder.parent / "other")
    place = place.format(here=folder.parent)
    names = load_model(str(GOLDEN_BASE), torch.float32).state_dict()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, place)}), "utf-8"
    )
    with pytest.raises(InvalidInput, match=r"leads out of the model's folder"):
        load_model(str(folder), torch.float32)
    (folder / "model.safetensors.index.json").unlink()
    edit(folder / "config.json", lambda data: data.update(transformers_weights=place))
    with pytest.raises(InvalidInput, match=r"leads out of the model's folder"):
        load_model(str(folder), torch.float32)


SHORT = {"max_length": 2, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}
PIECES = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
DAMAGES = {
    "characters that cannot be parsed": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "characters of another file": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAEAAAACAAAA"}},
    "a stride beyond the length": {"truncation": SHORT},
    "pieces that are no pattern": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
    },
    "a template without its token": {
        "post_processor": {"type": "TemplateProcessing", "single": PIECES, "pair": [], "special_tokens": {}}
    },
    "a decoder that cuts too much": {"decoder": {"type": "Strip", "content": "H", "start": 99, "stop": 99}},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tokenizer_is_an_error_of_one_line(
    damage: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edit(folder / "tokenizer.json", lambda data: data.update(DAMAGES[damage]))
    capfd.readouterr()
    with pytest.raises(InvalidInput) as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_panic_anywhere_ends_the_program_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from agent_r1 import cli

    panic = type("PanicException", (BaseException,), {})
    monkeypatch.setattr(cli.tasksets, "callback", lambda **options: (_ for _ in ()).throw(panic("index out of bounds")))
    assert cli.main(["tasksets"]) == cli.BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1

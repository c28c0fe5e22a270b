"""Models and adapters of a run, read by transformers and peft; their cards; the upload to a hub on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1.cli import main
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.export.config import ExportConfig
from agent_r1.export.run import export_run
from agent_r1.store.saved_weights import find_folder
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER

TOKEN = "hf_not-a-real-token-7"


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.arange(40)[None]).logits


def with_adapter(folder: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(TINY_BASE_FOLDER)
    return logits(peft.PeftModel.from_pretrained(base, folder))


def test_models_and_adapters_of_a_step_agree(adapted: Path, tmp_path: Path) -> None:
    found = {}
    for checkpoint in ("1", "last", "best"):
        for format_name in ("adapter", "model"):
            out = tmp_path / f"{format_name}-{checkpoint}"
            report = export_run(adapted, out, ExportConfig(format=format_name, checkpoint=checkpoint))
            found[format_name, checkpoint] = report.facts["step"]
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"model-{checkpoint}")
        assert torch.allclose(logits(merged), with_adapter(tmp_path / f"adapter-{checkpoint}"), atol=1e-4)
        assert not (tmp_path / f"model-{checkpoint}" / "trainer.safetensors").exists()
    assert [found["model", name] for name in ("1", "last")] == [1, 2]
    own = Path(find_folder(str(adapted)))
    assert torch.equal(with_adapter(own), with_adapter(tmp_path / "adapter-best"))
    assert AutoTokenizer.from_pretrained(tmp_path / "model-1").chat_template


def test_the_card_says_what_was_trained_and_how_well(adapted: Path, tmp_path: Path) -> None:
    export_run(adapted, tmp_path / "out", ExportConfig(format="adapter", checkpoint="1"))
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    header = ModelCard(card).data.to_dict()
    assert (header["library_name"], header["pipeline_tag"], header["tags"][-1]) == ("peft", "text-generation", "lora")
    for line in (
        "| base model | tiny-base |",
        "| task set | tinywiki |",
        "| LoRA rank | 4 |",
        "| algorithm | grpo 2402",
    ):
        assert line in card
    assert "| weights | step 1 of 2" in card
    assert "Validation of these weights (split `validation`, mean with 95 % interval): " in card and "n = 2." in card
    assert "PeftModel.from_pretrained(base, " in card and "base-tool-call" not in card
    export_run(adapted, tmp_path / "best", ExportConfig())
    assert "| trained | " in (tmp_path / "best" / "README.md").read_text("utf-8")


def test_a_checkpoint_that_does_not_exist_is_refused(adapted: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"weights: got 7 of .*; choose best, last or .*; there are: 1, 2"):
        export_run(adapted, tmp_path / "out", ExportConfig(checkpoint="7"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_saved_weights_is_refused(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"got best of .*, which has no such weights; .* there are: none"):
        export_run(recorded, tmp_path / "out", ExportConfig())


class Hub(ThreadingHTTPServer):
    """A hub on this machine that keeps what is uploaded. It answers as the Hugging Face Hub does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}
        self.tokens: set[str | None] = set()
        self.refuses = False


class _Requests(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization"))
        address = f"http://127.0.0.1:{self.server.server_port}"
        if self.server.refuses:
            self.answer(403, {"error": f"Forbidden: {self.headers.get('Authorization')} may not write"})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer(200, {"url": f"{address}/ann/out", "name": "ann/out"})
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self.answer(200, {"files": files})
        elif "/commit/main" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            self.server.files |= {one["value"]["path"]: one["value"] for one in lines if one["key"] == "file"}
            self.answer(200, {"commitUrl": f"{address}/ann/out/commit/1", "commitOid": "1", "success": True})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        else:
            self.answer(404, {"error": f"unknown {self.path}"})

    def do_GET(self) -> None:
        self.answer(200, {"id": "ann/out", "sha": "0", "siblings": []})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def test_an_export_is_uploaded_to_a_private_repository(
    recorded: Path, tmp_path: Path, hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["export", str(recorded), out, "--format", "trajectories", "--push", "ann/out", "--json"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["pushed"].endswith("/ann/out/commit/1")
    assert TOKEN not in shown.out + shown.err and hub.tokens == {f"Bearer {TOKEN}"}
    (created,) = hub.created
    assert created["visibility"] == "private" and created["type"] == "dataset" and created["name"] == "out"
    assert set(hub.files) == {"README.md", "export.json", "data/train-00000.parquet"}
    assert 'load_dataset("ann/out"' in (tmp_path / "out" / "README.md").read_text("utf-8")


def test_a_hub_that_refuses_is_one_line_without_the_token(recorded: Path, tmp_path: Path, hub: Hub) -> None:
    hub.refuses = True
    with pytest.raises(AgentR1Error) as error:
        export_run(recorded, tmp_path / "out", ExportConfig(format="metrics", push="ann/out"), public=True)
    assert "ann/out could not be uploaded (" in str(error.value) and "hf auth login" in str(error.value)
    assert TOKEN not in str(error.value) and "\n" not in str(error.value)
    assert (tmp_path / "out" / "metrics.csv").is_file()


def test_uploads_are_refused_before_any_work_if_they_are_switched_off(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InvalidInput, match="--push: got ann/out, but HF_HUB_OFFLINE is set; unset it"):
        export_run(recorded, tmp_path / "out", ExportConfig(format="metrics", push="ann/out"))
    assert list(tmp_path.iterdir()) == []

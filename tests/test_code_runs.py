"""Worlds that run code, from the command line: the sandbox they run in, and a step of training in each."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from sandboxed import sandbox_or_skip
from tests_tokenizer import hermes_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_r1.cli import main
from agent_r1.env.sandbox import Limits
from agent_r1.store import RunReader

Run = Callable[..., tuple[int, str, str]]

MBPP = {"text": "Double it.", "code": "def double(x): return 2 * x", "test_list": ["assert double(1) == 2"] * 2}
SMALL = [
    "--steps=1",
    "--groups_per_step=2",
    "--group_size=2",
    "--max_tokens=12",
    "--evaluate_n=2",
    "--checkpoint_every=0",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 that speaks the Hermes format byte by byte."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = hermes_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **small, **heads)).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "mbpp.jsonl"
    path.write_text("\n".join(json.dumps(MBPP | {"task_id": n, "text": f"Double {n}."}) for n in range(12)))
    return path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return call


def events(folder: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(folder / "run.db")) as base:
        return base.execute("SELECT kind, detail FROM events").fetchall()


def test_a_step_of_training_and_the_default_level_in_the_record(run: Run, data: Path, model: Path) -> None:
    sandbox = sandbox_or_skip(Limits())
    passing = ["--pass_k=2", "--pass_attempts=3", "--algorithm=ppo"]  # which learns from every attempt
    code, out, err = run(
        "train", "--task", "code", "--data", data, "--model", model, "--run", "r", *SMALL, *passing, "--json"
    )
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["measures"]["trained"]["test"] == {"first_pass_rate": 0.0, "fix_rate": 0.0}
    assert report["pass_at_k"] == {"k": 2, "shares": {"test": 0.0}, "attempts": 3, "ones": {"test": 0.0}}
    assert json.loads(Path("runs/r/config.json").read_text())["sandbox"] == "bubblewrap"
    assert ("sandbox", sandbox.in_force) in events(Path("runs/r"))
    with closing(RunReader(Path("runs/r"))) as reader:
        (step,) = reader.metrics()
    assert (step.values["first_pass_rate"], step.values["fix_rate"]) == (0.0, 0.0)
    assert f"sandbox: {sandbox.in_force}" in err
    code, out, err = run("eval", "--model", "r", "--n", "2", "--pass_k=1", "--json")
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    assert set(report["pass_at_k"]) == set(report["measures"]) == {"base-tool-call", "trained"}
    code, out, err = run(
        "eval", "--model", "r", "--task", "tinywiki", "--n", "1", "--json", "--quiet", "--context=8192"
    )
    assert code == 0, err  # another world is not told of the sandbox, nor of the file


def test_going_without_is_loud_and_recorded(
    run: Run, data: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = ("train", "--task", "code", "--data", data, "--model", model, "--sandbox", "none")
    code, _, err = run(*asked, "--run", "r", *SMALL)
    assert code == 0, err
    assert "sandbox 'none': programs written by a model run with your rights" in caplog.text
    assert "sandbox: none: nothing" in err
    assert json.loads(Path("runs/r/config.json").read_text())["sandbox"] == "none"
    assert ("sandbox", "none: nothing") in events(Path("runs/r"))


@pytest.mark.parametrize("task", ["code", "math"])
def test_where_the_level_does_not_hold_nothing_runs(
    task: str, run: Run, data: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(9))
    problems = data if task == "code" else data.with_name("gsm8k.jsonl")
    if task == "math":
        pytest.importorskip("math_verify", reason="math-verify is not installed (extra math)")
        problems.write_text("\n".join(rows))
    monkeypatch.setattr("agent_r1.env.sandbox.selftest._proved", lambda: refused())
    code, out, err = run("train", "--task", task, "--data", problems, "--model", model, *SMALL)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "accept the risk with --sandbox none" in err
    assert not Path("runs").exists()


def refused() -> None:
    from agent_r1.env.sandbox.selftest import refusal

    raise refusal("no program bwrap", "install bubblewrap")


def test_a_level_that_would_do_nothing_is_refused(run: Run, tmp_path: Path) -> None:
    code, _, err = run("train", "--sandbox", "none")
    assert (code, "leave it out: tinywiki runs no code" in err) == (2, True)
    file = tmp_path / "agent.py"
    file.write_text("")
    code, _, err = run("train", file, "--sandbox", "none")
    assert (code, "--sandbox: got it and" in err) == (2, True)
    code, _, err = run("train", "--task", "code", "--sandbox", "docker")
    assert (code, "it should be 'bubblewrap' or 'none'" in err) == (2, True)

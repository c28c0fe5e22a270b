"""The questions of an evaluation: those that the agent was not trained on."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_r1.cli import main
from agent_r1.retrieval.client import open_retriever
from agent_r1.training.checkpoint_files import save_model
from research.tiny_base.tokenizer import make_tokenizer

Run = Callable[..., tuple[int, dict[str, Any], str]]
TINY = ["--groups_per_step", "2", "--group-size=2", "--max_tokens", "8", "--quiet", "--json"]
CONTEXT = [["Alba", ["Alba is ruled by Bruno."]], ["Bruno", ["Bruno lives in Caro."]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(["Who rules Alba"])
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    config = Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads)
    return str(save_model(tmp_path_factory.mktemp("tiny"), Qwen3ForCausalLM(config), tokenizer))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, dict[str, Any], str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, json.loads(out.splitlines()[-1]) if out else {}, err

    return call


def write(path: Path, numbers: range) -> Path:
    asked = [{"question": f"Who rules Alba in {n}?", "answer": "Bruno", "context": CONTEXT} for n in numbers]
    path.write_text(json.dumps([row | {"supporting_facts": [["Alba", 0]]} for row in asked]), "utf-8")
    return path


def evaluated(run: Run, *arguments: object) -> dict[str, int]:
    """How many questions of each split the table is over."""
    code, data, err = run(
        "eval", *arguments, "--max_tokens", "2", "--evaluate_n", "500", "--methods", "base-tool-call", "--json"
    )
    assert code == 0, err
    return {split: cell["n"] for split, cell in data["table"]["base-tool-call"].items()}


def test_a_run_is_not_evaluated_on_training_questions_whatever_the_file_is_called(
    run: Run, model: str, tmp_path: Path
) -> None:
    data = write(tmp_path / "g.json", range(40))
    code, _, err = run(
        "train", "--taskset", "hotpotqa", "--data", "g.json", "--model", model, "--steps", 1, "--run", "r1", *TINY
    )
    assert code == 0, err
    os.symlink(data, tmp_path / "link.json")
    for same in ("g.json", data, "../" + tmp_path.name + "/g.json", "link.json"):
        assert evaluated(run, "--model", "r1", "--data", same) == {"test": 8}, same
    # A copy under another name: the training questions are left out, 28 of 40.
    assert evaluated(run, "--model", "r1", "--data", write(tmp_path / "copy.json", range(40))) == {"all": 12}
    assert evaluated(run, "--model", "r1", "--data", write(tmp_path / "more.json", range(30, 60))) == {"all": 30 - 7}
    assert evaluated(run, "--model", model, "--taskset", "hotpotqa", "--data", data) == {
        "all": 40
    }  # no run: all of them
    data.unlink()
    warnings = run("eval", "--model", "r1", "--data", "copy.json", "--evaluate_n", 1, "--max_tokens", 2, "--json")[2]
    assert evaluated(run, "--model", "r1", "--data", "copy.json") == {"all": 40}
    assert "WARNING: training questions may be among these" in warnings


def test_an_index_is_shared_while_its_file_is_unchanged(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Alba", "text": "Alba"}), "utf-8")
    first = open_retriever(corpus)
    (tmp_path / "search.toml").write_text('corpus = "corpus.jsonl"', "utf-8")
    assert open_retriever(corpus) is first and open_retriever(tmp_path / "search.toml") is first
    corpus.write_text(json.dumps({"title": "Bruno", "text": "Bruno"}), "utf-8")
    os.utime(corpus, ns=(1, 1))
    (found,) = open_retriever(corpus).search(["Bruno"])
    assert found[0].title == "Bruno" and open_retriever(corpus) is not first


def test_settings_of_a_task_set_are_refused_beside_a_file(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from agent_r1 import Message, Task, ToolEnv, exact_match\nenv = ToolEnv([], [exact_match])\n"
        "tasks = [Task('a', (Message.user('Who?'),), {'answers': ('x',)})]\n",
        "utf-8",
    )
    for given in (("--data", "zzz"), ("--sandbox", "none"), ("--corpus", "x")):
        code, _, err = run("eval", "own.py", "--model", model, *given)
        assert code == 2 and f"{given[0]}: got it and own.py; leave one out" in err
    code, _, err = run("train", "own.py", "--model", model, "--steps", 1, "--run", "r2", *TINY)
    assert code == 0, err
    assert run("eval", "own.py", "--model", "r2", "--json")[0] == 0  # the run's own task set is no such setting


def test_an_evaluation_reads_the_settings_of_a_file(run: Run, model: str, tmp_path: Path) -> None:
    write(tmp_path / "g.json", range(40))
    (tmp_path / "run.toml").write_text(
        'taskset = "hotpotqa"\ndata = "g.json"\n[trainer]\nlearning_rate = 1e-3\n', "utf-8"
    )
    assert evaluated(run, "--config", "run.toml", "--model", model) == {"all": 40}
    (tmp_path / "eval.toml").write_text(
        f'taskset = "hotpotqa"\ndata = "g.json"\nmodel = "{model}"\nevaluate_n = 3\n', "utf-8"
    )
    code, data, err = run("eval", "--config", "eval.toml", "--max_tokens", "2", "--methods", "base-tool-call", "--json")
    assert code == 0 and data["table"]["base-tool-call"]["all"]["n"] == 3, err

"""Training through real vLLM servers. Runs with VLLM_PYTHON, the Python of an environment with vLLM (make test-vllm).

The model is a random Llama with heads of 32, because vLLM's kernels for CPUs start there, and with tied embeddings.
"""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch
from training.test_vllm_servers import processes
from transformers import LlamaConfig, LlamaForCausalLM

import agent_r1
from agent_r1 import Task, ToolEnv, Trajectory
from agent_r1.inference.server_process import GUARD
from agent_r1.model.load import load_tokenizer
from agent_r1.store import RunReader
from agent_r1.store.verification import verify
from agent_r1.training.api import StepReport

PYTHON = os.environ.get("VLLM_PYTHON", "")
STEPS = 12
SERVER = "vllm.entrypoints.openai.api_server"
OWN = f"agent-r1-weights-{os.getpid()}-"
"""A part of the folder from which this process starts servers."""

pytestmark = [pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no Python"), pytest.mark.timeout(1800)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = load_tokenizer("tiny-base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def even_tokens(trajectory: Trajectory, task: Task) -> float:
    """Return the share of sampled tokens with an even id. A random policy can learn this."""
    tokens = [token for turn in trajectory.turns for token in turn.action_ids]
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def kill_one_server(report: StepReport) -> None:
    if report.step == STEPS // 2:
        os.kill(min(set(processes(SERVER, OWN)) - set(processes(GUARD.name))), signal.SIGKILL)


@pytest.mark.parametrize("rank", [0, 4])
def test_training_learns_and_survives_the_death_of_a_server(
    rank: int, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step updates the weights, with a canary. With an adapter, merged weights are sent, and it learns slowly."""
    agent_r1.train(
        ToolEnv(tools=[], rewards=[even_tokens]),
        [Task(f"task {number}", "the a of b") for number in range(8)],
        model=str(folder),
        callbacks=[kill_one_server],
        run=str(tmp_path / "run"),
        steps=STEPS,
        groups_per_step=4,
        group_size=8,
        max_tokens=16,
        context=512,
        tool_format="tags",
        trainer={"learning_rate": 3e-3 if rank == 0 else 3e-2, "lora": {"rank": rank}},
        engine={
            "backend": "vllm",
            "replicas": 2,
            "max_sequences": 16,
            "kv_cache_gib": 1,
            "vllm": {"python": PYTHON, "arguments": "--enforce-eager --block-size 32"},
        },
    )
    assert verify(tmp_path / "run").is_valid
    with closing(RunReader(tmp_path / "run")) as reader:
        steps = [step.values for step in reader.metrics() if "reward" in step.values]
        versions = {s.version for t in reader.trajectories() for turn in t.turns for s in turn.version_spans}
    assert versions == set(range(STEPS)) and max(step["logprob_gap"] for step in steps) < 1e-4
    assert rank or steps[-1]["reward"] > steps[0]["reward"] + 0.1
    assert caplog.text.count("is left out") == 1
    assert not processes(SERVER, OWN)

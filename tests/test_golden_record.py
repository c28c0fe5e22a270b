"""The first step of six short runs, compared with a record within rounding errors, and a run that equals itself.

Later steps cannot be compared between processors: Adam divides small gradients, and samples follow the weights. Within
one machine whole runs repeat bit for bit.

`python tests/test_golden_record.py` writes the record again; a commit that changes it says why.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from golden_base import GOLDEN_BASE

from agent_r1.config import Layer
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import run_digest
from agent_r1.tasksets import build
from agent_r1.training import build as build_module, run
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.progress import SilentProgress

RECORD = Path(__file__).parent / "golden" / "record.json"

SHORT: Mapping[str, Any] = {
    "model": GOLDEN_BASE,
    "steps": 1,
    "groups_per_step": 4,
    "group_size": 4,
    "evaluate_every": 0,
    "evaluate_n": 1,
    "pass_k": 0,
    "checkpoint_every": 0,
    "trainer.learning_rate": 1e-3,
    "engine.decode_step": "torch",
    "trainer.share_prefixes": "off",
}

RUNS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "ppo": {"algorithm": "ppo", "algorithm.advantage.lam": 1.0},
    "gspo": {"algorithm": "gspo", "trainer.minibatches": 2},
    "dapo with refill": {"algorithm": "dapo", "group_size": 2},
    "summary context": {"group_size": 8, "context_policy.name": "summary", "context_policy.keep_turns": 1},
    "process rewards": {"algorithm": "grpo", "reward_weights.found": 0.1},
}

METRICS = ("reward", "em", "entropy", "policy_loss", "value_loss", "policy_gradient_norm", "advantage_std", "tokens")


def train(settings: Mapping[str, Any], folder: Path) -> None:
    taskset = build("tinywiki", None, None, 0)
    config = resolve_config(TrainConfig, [Layer("golden", {**SHORT, **settings, "run": str(folder)})], taskset)
    with pytest.MonkeyPatch.context() as patch:
        # A machine with less memory may get smaller micro-batches, whose sums have another order.
        patch.setattr(build_module, "available_memory", lambda device: 64 * 2**30)
        run.train(config, taskset, SilentProgress())


def first_step(folder: Path) -> dict[str, Any]:
    """Return what must not depend on the processor (tokens), and what may differ by rounding errors."""
    reader = RunReader(folder)
    try:
        attempts = list(reader.trajectories("train"))
        fates = [fate for fate in reader.fates() if fate.fate == "trained"]
        curves = {name: reader.curve(name) for name in METRICS}
    finally:
        reader.close()
    tokens = [[turn.parent, turn.new_ids, turn.action_ids] for one in attempts for turn in one.turns]
    return {
        "tokens": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
        "logprobs": [round(sum(sum(turn.logprobs) for turn in one.turns), 4) for one in attempts],
        "rewards": [dict(one.rewards) for one in attempts],
        "credits": [round(fate.credit or 0.0, 4) for fate in fates],
        "metrics": {name: curve[1] for name, curve in curves.items() if 1 in curve},
    }


def digest(folder: Path) -> str:
    reader = RunReader(folder)
    try:
        return run_digest(reader)
    finally:
        reader.close()


@pytest.mark.parametrize("name", RUNS)
def test_the_first_step_of_a_run_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    train(RUNS[name], tmp_path / "run")
    found, golden = first_step(tmp_path / "run"), json.loads(RECORD.read_text("utf-8"))[name]
    assert found["tokens"] == golden["tokens"]
    assert found["rewards"] == golden["rewards"]
    assert found["logprobs"] == pytest.approx(golden["logprobs"], abs=2e-3)
    assert found["credits"] == pytest.approx(golden["credits"], rel=1e-3, abs=2e-3)
    assert found["metrics"] == pytest.approx(golden["metrics"], rel=2e-3, abs=1e-4)


def test_a_run_equals_itself_bit_for_bit(tmp_path: Path) -> None:
    # Attempts meet in other batches and finish in another order if fewer of them run at the same time.
    for name, concurrency in (("one", 256), ("two", 3)):
        train({"steps": 3, "concurrency": concurrency}, tmp_path / name)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def write_record() -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = {}
        for name, settings in RUNS.items():
            place = Path(folder) / name.replace(" ", "-")
            train(settings, place)
            record[name] = first_step(place)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    write_record()

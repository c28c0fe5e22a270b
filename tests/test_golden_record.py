"""Six short runs reproduce, bit for bit, what an earlier version of the code recorded.

Bits depend on the build of PyTorch and on the processor, so each kind of processor has a file of its own in
`tests/golden`. `record.json` was recorded on an Intel Xeon before the redesign. `record_amd_epyc.json` was recorded on
an AMD EPYC of family 26 with the code of commit 8c6ab29, which reproduced `record.json` on the Xeon, and
`record_amd_epyc_family_25.json` on an AMD EPYC of family 25 with the code of commit 0033230, which reproduced
`record_amd_epyc.json`. On other platforms these tests skip and name the processor; `tests/training` still proves there
that a run equals itself.

`python tests/test_golden_record.py FILE` writes a record of this platform; a commit that changes a record says why.
"""

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_base import GOLDEN_BASE

from agent_r1.config import Layer
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.training import build as build_module, run
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.progress import SilentProgress

RECORDS = Path(__file__).parent / "golden"
CPU_INFO = Path("/proc/cpuinfo")

SHORT: Mapping[str, Any] = {
    "model": GOLDEN_BASE,
    "steps": 6,
    "groups_per_step": 4,
    "group_size": 4,
    "evaluate_every": 3,
    "evaluate_n": 4,
    "pass_k": 0,
    "checkpoint_every": 0,
    "trainer.learning_rate": 1e-3,
    # The record was computed without the native step and without shared prefixes, which differ in the last bits.
    "engine.decode_step": "torch",
    "trainer.share_prefixes": "off",
}

CRITIC_IN_THE_PASSES_OF_THE_POLICY: Mapping[str, Any] = {
    "trainer.critic_epochs": None,
    "trainer.critic_minibatches": 1,
    "trainer.critic_reads_logprobs": False,
}

RUNS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "ppo": {"algorithm": "ppo", **CRITIC_IN_THE_PASSES_OF_THE_POLICY},
    "gspo": {"algorithm": "gspo", "trainer.minibatches": 2},
    "dapo with refill": {"algorithm": "dapo", "group_size": 2},
    "summary context": {"group_size": 8, "context_policy.name": "summary", "context_policy.keep_turns": 1},
    "process rewards": {"algorithm": "grpo", "reward_weights.found": 0.1},
}


def platform() -> dict[str, str]:
    """Return the properties of this machine that decide the bits of floating-point sums, as far as they are known."""
    info = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    name, family, model = (
        next(iter(re.findall(rf"^{key}\s*: (.*)$", info, re.MULTILINE)), "unknown")
        for key in ("model name", "cpu family", "model")
    )
    processor = f"{name}, {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": torch.__version__, "processor": processor, "generation": f"family {family}, model {model}"}


def find_record() -> Mapping[str, Any] | None:
    """Return the record whose platform is this machine, or None if there is none.

    `record.json` does not name the generation of its processor, and belongs to every processor of its name.
    """
    records = [json.loads(file.read_text()) for file in sorted(RECORDS.glob("record*.json"))]
    return next((record for record in records if record["platform"].items() <= platform().items()), None)


def record_run(settings: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Train with these settings; the hashes of the trajectories and of the final weights."""
    taskset = build("tinywiki", None, None, 0)
    config = resolve_config(TrainConfig, [Layer("golden", {**SHORT, **settings, "run": str(folder)})], taskset)
    run.train(config, taskset, SilentProgress())
    reader = RunReader(folder)
    try:
        lived = hashlib.sha256(json.dumps(list(entries(reader)), sort_keys=True).encode()).hexdigest()
    finally:
        reader.close()
    weights = hashlib.sha256((folder / "model/model.safetensors").read_bytes()).hexdigest()
    return {"trajectories": lived, "weights": weights}


def entries(reader: RunReader) -> Iterator[Any]:
    """Tokens, log-probabilities and rewards of every attempt, then the sum of advantages of each that was trained."""
    for trajectory in reader.trajectories():
        yield [trajectory.task_id, str(trajectory.status), dict(trajectory.rewards)]
        for turn in trajectory.turns:
            yield [turn.parent, turn.new_ids, turn.action_ids, turn.logprobs]
            yield [dict(turn.rewards), [dict(rewards) for rewards in turn.call_rewards], turn.call_ends]
    for fate in reader.fates():
        yield [fate.attempt.group_id, fate.attempt.sample_index, fate.attempt.retry, fate.step, fate.fate, fate.credit]


def assume_memory(patch: pytest.MonkeyPatch) -> None:
    """Let runs plan with 64 GiB of memory, because a machine with less memory may get smaller micro-batches."""
    patch.setattr(build_module, "available_memory", lambda device: 64 * 2**30)


@pytest.mark.parametrize("name", RUNS)
def test_run_equals_the_golden_record(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = find_record()
    if golden is None:
        pytest.skip(f"tests/golden has no record of this platform: {platform()}")
    assume_memory(monkeypatch)
    assert record_run(RUNS[name], tmp_path / "run") == golden["runs"][name]


def test_a_record_belongs_to_the_processor_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    for file in RECORDS.glob("record*.json"):
        record = json.loads(file.read_text())
        assert set(record["runs"]) == set(RUNS)
        monkeypatch.setattr(module, "platform", lambda record=record: {"generation": "any", **record["platform"]})
        assert find_record() == record
        other = {**record["platform"], "processor": "another processor"}
        monkeypatch.setattr(module, "platform", lambda other=other: {"generation": "any", **other})
        assert find_record() is None


def test_the_record_is_found_by_what_the_system_says_of_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nstepping\t: 1\n\n"
    (tmp_path / "cpuinfo").write_text(2 * f"processor\t: 0\n{core}")
    monkeypatch.setattr(sys.modules[__name__], "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert find_record() == json.loads((RECORDS / "record_amd_epyc.json").read_text())


def write_record(file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        assume_memory(patch)
        runs = {name: record_run(settings, Path(folder) / name.replace(" ", "-")) for name, settings in RUNS.items()}
    file.write_text(json.dumps({"platform": platform(), "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    write_record(Path(sys.argv[1]))

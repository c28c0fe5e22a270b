"""``agent-r1 plan``: costs are recovered from recorded runs, and what does not fit is refused with a remedy."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from recorded_runs import record_all
from shown_runs import make_trajectory

from agent_r1.cli import main
from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import AttemptFate, AttemptFinished, AttemptStarted, PolicyPublished, StepMetrics
from agent_r1.core.inference import PolicyVersion
from agent_r1.core.profile import Part, PartTime, StepProfile
from agent_r1.core.trajectory import TurnTiming
from agent_r1.model.pass_memory import kv_bytes_per_token
from agent_r1.store.folder import create_run
from agent_r1.store.reader import RunReader, read_hardware
from agent_r1.training.memory_estimate import plan_memory
from agent_r1.training.plan import kv_capacity, model_size, plan_cluster, shape_of
from agent_r1.training.plan_config import GPUS, MODEL_SHAPES, Gpu, PlanConfig
from agent_r1.training.simulation import Cluster, EngineCost, GroupLoad, Schedule, TrainerCost, TurnLoad, simulate
from agent_r1.training.step_costs import (
    RecordedRun,
    engine_on,
    load_factor,
    measure_cluster,
    read_profiled_run,
    read_run,
    schedule_of,
    slower,
)

COST = EngineCost(step=2e-3, sequence=1e-4, prefill_pass=4e-3, prefill_token=2e-5, request=1e-3, rows=64)
TRAINER = TrainerCost(update=0.05, token=1e-4, publish=0.02)


def recorded(size: int, lengths: tuple[int, ...], tool_seconds: float, factor: float = 1.0) -> RecordedRun:
    """A run whose profiles are what an engine and a trainer with the costs above need, on a loaded machine."""
    config = {"groups_per_step": 2, "max_staleness": 0, "concurrency": 64, "engine": {"max_sequences": 64}}

    def group(number: int) -> GroupLoad:
        turns = [TurnLoad(30, length + (index + number) % 3, tool_seconds) for index, length in enumerate(lengths)]
        return tuple((turns[index % len(turns)], *turns) for index in range(size))

    steps = tuple((group(step), group(step + 1)) for step in range(3))
    profiles = []
    for groups in steps:
        work = simulate(groups, slower(Cluster(1, COST, TRAINER), factor), Schedule(2)).work
        tokens = sum(turn.new_tokens + turn.action_tokens for each in groups for attempt in each for turn in attempt)
        seconds = {
            Part.GENERATION: work.batches * COST.step + work.tokens * COST.sequence,
            Part.PREFILL: work.passes * COST.prefill_pass + work.new_tokens * COST.prefill_token,
            Part.RENDERING: work.requests * COST.request,
            Part.FORWARD: tokens * TRAINER.token,
            Part.OPTIMIZER: TRAINER.update,
            Part.PUBLISH: TRAINER.publish,
        }
        profiles.append(StepProfile({part: PartTime(factor * each, each) for part, each in seconds.items()}))
    return RecordedRun(config, steps, tuple(profiles))


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_costs_are_recovered_from_runs_of_different_batches(factor: float) -> None:
    """By CPU time, also if other programs make the machine slower."""
    runs = [recorded(8, (5, 9, 4), 0.0, factor), recorded(2, (20, 7), 0.5, factor)]
    assert load_factor(runs[0], "cpu") == pytest.approx(factor)
    found = measure_cluster(runs, "cpu")
    assert asdict(found.engine) == pytest.approx(asdict(COST), rel=1e-3)
    assert asdict(found.trainer) == pytest.approx(asdict(TRAINER), rel=1e-6)
    held_out = recorded(4, (12, 3, 3, 8), 0.2)
    truth = simulate(held_out.groups, Cluster(1, COST, TRAINER, is_shared=True), schedule_of(held_out.config))
    predicted = simulate(held_out.groups, found, schedule_of(held_out.config))
    assert predicted.step_seconds == pytest.approx(truth.step_seconds, rel=1e-3)


def test_a_recorded_run_is_planned_with_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, small = tmp_path / "run", ["--groups_per_step", "2", "--group_size", "2", "--steps", "2", "--quiet"]
    fast = ["--evaluate_every", "0", "--evaluate_n", "1", "--pass_k", "0", "--splits", "style-a", "--profile", "1"]
    assert main(["train", *small, *fast, "--checkpoint_every", "0", "--run", str(run)]) == 0
    capsys.readouterr()

    def step_seconds(*options: str) -> list[float]:
        assert main(["plan", str(run), "--json", *options]) == 0
        return [found["step_seconds"] for found in json.loads(capsys.readouterr().out)["predictions"]]

    alone = step_seconds()
    assert len(alone) == 2 and 0 < alone[1] <= 1.1 * alone[0]
    assert step_seconds("--group_size", "16")[0] > alone[0]
    assert step_seconds("--tool_seconds", "100")[0] > 100
    assert step_seconds("--model", "qwen2.5-0.5b", "--gpu", "h100", "--tool_seconds", "100")[0] > 100
    assert main(["plan", str(run), "--gpus", "2"]) == 2
    assert "gpus: got 2; give --gpu too, or leave it out" in capsys.readouterr().err
    assert main(["plan", str(run), str(run), "--gpu", "h100"]) == 2
    assert "give one run with --gpu" in capsys.readouterr().err
    assert main(["plan", str(run)]) == 0
    assert "predicted, not measured: the machine of the recorded run" in capsys.readouterr().out
    with closing(RunReader(run)) as reader:
        assert read_hardware(reader)["torch"] == torch.__version__
        metrics = next(reader.metrics()).values
        assert metrics["engine/requests"] > 0 and metrics["engine/generated_tokens"] >= metrics["tokens"]
        assert 0 < metrics["engine/prefilled_tokens"] < metrics["engine/prompt_tokens"]
        for trajectory in reader.trajectories("train"):
            assert trajectory.start_time > 0
            timings = [turn.timing for turn in trajectory.turns]
            assert all(
                one.start_seconds <= one.first_token_seconds <= one.end_seconds <= trajectory.seconds for one in timings
            )
            assert all(one.end_seconds + one.env_seconds <= two.start_seconds for one, two in pairwise(timings))


def test_attempts_have_the_recorded_times_of_their_environment(tmp_path: Path) -> None:
    """With any engine and without a profile. A short time counts as computation of the process."""
    folder = tmp_path / "run"
    with closing(create_run(folder, {"engine": {"backend": "vllm"}})) as writer:
        attempt = make_trajectory(1, 0)
        timings = [TurnTiming(0.0, 0.5, env_seconds=seconds) for seconds in (2.5, 0.01)]
        turns = tuple(replace(turn, timing=timing) for turn, timing in zip(attempt.turns, timings, strict=True))
        timed = replace(attempt, turns=turns)
        started, fate = AttemptStarted(timed.attempt, "train", 0), AttemptFate(timed.attempt, "trained", 1, credit=0.0)
        first = PolicyPublished(PolicyVersion(0, 0))
        record_all(writer, [first, started, AttemptFinished(timed), fate, StepMetrics(1, {"reward": 0.0})])
    assert read_run(folder).groups == (((TurnLoad(3, 2, 2.5), TurnLoad(1, 2, 0.0)),),)
    with pytest.raises(InvalidInput, match=r"with engine.backend vllm; .* or give --gpu"):
        read_profiled_run(folder)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """The config.json of a model of two layers."""
    shape = {**MODEL_SHAPES["qwen2.5-0.5b"][1], "num_hidden_layers": 2, "vocab_size": 4096, "model_type": "qwen2"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    return str(path)


def config_of(model: str, **settings: object) -> PlanConfig:
    values = {"model": model, "gpu": "h100", "context": 1024, "groups_per_step": 2, "group_size": 4, **settings}
    return PlanConfig.model_validate(values)


def test_memory_is_the_estimate_of_training_and_engines_have_the_rest(small: str) -> None:
    config, model = config_of(small, gpus=3, trainer={"ranks": 2}), shape_of(small)
    plan = plan_cluster(config)
    assert plan.machine == "3 x h100, 2 for the trainer, 1 engines of 1"
    servers = config.engine.model_copy(update={"backend": "vllm"})
    trainer = config.trainer.model_copy(update={"share_prefixes": "off"})
    expected = plan_memory(
        model, config.model_copy(update={"engine": servers, "trainer": trainer}), 1024, available=10**12
    )
    assert str(expected) in plan.memory[0]
    rest = 0.9 * 80 * 2**30 - 4 * model.num_parameters()
    assert plan.memory[1] == f"KV cache of an engine: {rest / kv_bytes_per_token(model, 'float32'):,.0f} tokens"


def test_more_gpus_are_not_slower_and_engines_share_their_arithmetic(small: str) -> None:
    steps = [plan_cluster(config_of(small, gpus=gpus)).predictions[0].step_seconds for gpus in (2, 8)]
    assert steps[1] <= steps[0]
    size = model_size(shape_of(small), config_of(small))
    one, two = (engine_on(GPUS["h100"], size, gpus, 64, 1e6) for gpus in (1, 2))
    assert two.decode(8, 1000) - two.step == pytest.approx((one.decode(8, 1000) - one.step) / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h1000"], "gpu: got h1000; did you mean 'h100'?"),
        ([], "gpu: got nothing"),
        (["--gpu", "h100", "--gpu_memory", "1.4"], "are needed; give --trainer.activation_checkpointing true"),
        (["--gpu", "h100", "--gpus", "2", "--trainer.ranks", "2"], "gpus: got 2, of which the trainer takes 2"),
        (["--gpu", "h100", "--model", "none.json"], "model: got none.json"),
        (["no-such-run"], "give the name or the folder of a run"),
        (["--gpu", "h100", "--clock", "cpu"], "clock: got cpu; leave out --gpu, and give a recorded run"),
    ],
)
def test_bad_input_and_runs_that_do_not_fit_are_refused_in_one_line(
    options: list[str], message: str, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", small, "--context", "1024", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_a_context_that_no_engine_holds_is_refused_with_the_parallel_size_that_does(small: str) -> None:
    config = config_of(small, gpus=2)
    size = model_size(shape_of(small), config)
    memory = (size.weights * size.served_bytes + 100 * size.kv_bytes) / 0.9 / 2**30  # for 100 of 1024 tokens
    with pytest.raises(InvalidInput, match="--tensor-parallel-size 2"):
        kv_capacity(config, Gpu(memory, 1, 1), size, gpus=1)
    assert kv_capacity(config, Gpu(memory, 1, 1), size, gpus=2) > 1024

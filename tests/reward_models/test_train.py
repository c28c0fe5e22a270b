"""A reward model learns from recorded attempts which ones succeed, is saved, and judges other attempts of a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from learning_fixtures import Make
from recorded_traces import BAD, GOOD, attempts, record

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory, Unscored
from agent_r1.model.load import load_tokenizer
from agent_r1.renderers.byte_tokenizer import byte_tokenizer
from agent_r1.reward_models.config import RewardModelConfig
from agent_r1.reward_models.evaluation import read_traces, split_by_task
from agent_r1.reward_models.network import RewardModelScorer, load_reward_model
from agent_r1.reward_models.train import RewardModelReport, train_reward_model
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER

FAST = {"learning_rate": 1e-2, "epochs": 6, "batch_size": 16, "held_out": 0.3, "reward": "em"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "run", attempts())


def fit(run: Path, out: Path, **settings: object) -> RewardModelReport:
    config = RewardModelConfig.model_validate({**FAST, "out": out, **settings})
    return train_reward_model([run], config, lambda line: None)


def rewards(folder: Path, group: list[Trajectory]) -> list[object]:
    model = load_reward_model(folder, load_tokenizer(str(TINY_BASE_FOLDER)))
    scores = asyncio.run(RewardModelScorer("quality", model).score(group, Task("task-0", ())))
    return [one["quality"] for one in scores]


def test_no_task_is_both_trained_on_and_held_out_and_the_division_is_the_same_for_all_runs(run: Path) -> None:
    traces = read_traces([run, run], "em")
    split = split_by_task(traces, 0.3, seed=0)
    held_out, trained = ({one.trajectory.task_id for one in part} for part in (split.held_out, split.training))
    assert held_out and trained and not held_out & trained
    assert {one.group[0] for one in traces} == {0, 1} and len(traces) == 192
    assert split_by_task(traces[:96], 0.3, seed=0).held_out == tuple(one for one in split.held_out if one.group[0] == 0)


def test_without_a_name_the_weighted_sum_of_the_run_is_predicted(run: Path) -> None:
    assert [one.target for one in read_traces([run], "")][:2] == [1.0, 0.0]  # bonus has weight 0
    assert {one.target for one in read_traces([run], "bonus")} == {0.25}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss": "pairs"},
        {"loss": "regression"},
        {"kind": "turns"},
        {"kind": "implicit", "beta": 1.0, "loss": "pairs"},
    ],
    ids=["outcome", "pairs", "regression", "turns", "implicit"],
)
def test_a_reward_model_tells_successes_from_failures_at_tasks_that_it_has_not_seen(
    run: Path, tmp_path: Path, make: Make, settings: dict[str, object]
) -> None:
    report = fit(run, tmp_path / "rm", **settings)
    assert report.evaluation.model.auc > 0.95 and report.evaluation.model.within_tasks > 0.95
    assert report.losses[-1] < report.losses[0]
    assert all(0.2 < one.auc < 0.8 for one in report.evaluation.baselines.values())
    stored = json.loads((tmp_path / "rm" / "reward_model.json").read_text("utf-8"))
    assert stored["evaluation"]["model"]["auc"] == report.evaluation.model.auc and stored["runs"] == ["run"]

    good, bad = (make.trajectory(make.chain(([150, 151], [250]), ([350], [token]))) for token in (GOOD, BAD))
    first, second = rewards(tmp_path / "rm", [good, bad])
    totals = [sum(one) if isinstance(one, tuple) else one for one in (first, second)]
    assert totals[0] > totals[1]
    if "kind" in settings:
        assert isinstance(first, tuple) and len(first) == 2  # one number per turn
    else:
        assert isinstance(first, float) and (0 <= first <= 1 or settings.get("loss") == "regression")


@pytest.mark.parametrize("kind", ["turns", "implicit"])
def test_rewards_of_turns_add_up_to_the_prediction_and_silent_turns_get_nothing(
    run: Path, tmp_path: Path, make: Make, kind: str
) -> None:
    fit(run, tmp_path / "rm", kind=kind, epochs=1)
    silent = make.trajectory(make.chain(([150], [250]), ([350], []), ([351], [GOOD, 7])))
    nothing = make.trajectory(make.chain(([150], [])), member=1)
    values, unscored = rewards(tmp_path / "rm", [silent, nothing])
    model = load_reward_model(tmp_path / "rm", load_tokenizer(str(TINY_BASE_FOLDER)))
    assert isinstance(values, tuple) and values[1] == 0.0
    assert sum(values) == pytest.approx(model.prediction(model.score([silent], 1000)[0][0]))
    assert unscored == Unscored("there is no sampled token to read")


def test_an_implicit_reward_is_bounded_unless_the_log_ratio_is_chosen(run: Path, tmp_path: Path, make: Make) -> None:
    settings = {"kind": "implicit", "beta": 20.0, "epochs": 1}
    fit(run, tmp_path / "bounded", **settings)
    fit(run, tmp_path / "ratio", **settings, implicit_reward="log_ratio")
    attempt = make.trajectory(make.chain(([150, 151], [250]), ([350], [GOOD] * 20)))
    (bounded,), (ratio,) = (rewards(tmp_path / name, [attempt]) for name in ("bounded", "ratio"))
    assert isinstance(bounded, tuple) and isinstance(ratio, tuple)
    model = load_reward_model(tmp_path / "ratio", load_tokenizer(str(TINY_BASE_FOLDER)))
    assert ratio == model.score([attempt], 1000)[0][1] and abs(sum(ratio)) > 1
    assert bounded[0] == pytest.approx(torch.sigmoid(torch.tensor(ratio[0])).item(), abs=1e-5)
    assert 0 <= sum(bounded) <= 1 and sum(bounded) == pytest.approx(model.prediction(sum(ratio)), abs=1e-5)


def test_equal_seeds_give_equal_reward_models(run: Path, tmp_path: Path) -> None:
    first, second = (fit(run, tmp_path / name, epochs=1) for name in ("one", "two"))
    assert (first.losses, first.evaluation) == (second.losses, second.evaluation)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


def test_half_precision_keeps_float32_weights(run: Path, tmp_path: Path) -> None:
    assert fit(run, tmp_path / "rm", dtype="bfloat16").evaluation.model.auc > 0.9


def test_wrong_inputs_are_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'bonus'"):
        fit(run, tmp_path / "rm", reward="bonos")
    with pytest.raises(InvalidInput, match="all successes or all failures"):
        fit(run, tmp_path / "rm", reward="bonus")
    with pytest.raises(InvalidInput, match=r"0\.3 of 1 tasks"):
        fit(record(tmp_path / "small", attempts(tasks=1)), tmp_path / "rm")
    (tmp_path / "exists").mkdir()
    with pytest.raises(InvalidInput, match="which exists"):
        fit(run, tmp_path / "exists")
    equal = [one for one in attempts() if one.rewards["em"] == one.attempt.group_id % 2]
    with pytest.raises(InvalidInput, match="no group has two different rewards"):
        fit(record(tmp_path / "equal", equal), tmp_path / "rm", loss="pairs")
    assert not (tmp_path / "rm").exists()


def test_a_reward_model_refuses_a_policy_with_other_tokens(run: Path, tmp_path: Path) -> None:
    fit(run, tmp_path / "rm", epochs=1)
    with pytest.raises(InvalidInput, match="another vocabulary than the policy"):
        load_reward_model(tmp_path / "rm", byte_tokenizer())
    (tmp_path / "rm" / "reward_model.json").write_text('{"format": 1}', "utf-8")
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_reward_model(tmp_path / "rm", load_tokenizer(str(TINY_BASE_FOLDER)))


def test_fewer_attempts_are_trained_on_and_all_held_out_ones_are_scored(run: Path, tmp_path: Path) -> None:
    whole, small = (fit(run, tmp_path / f"rm{most}", epochs=1, max_attempts=most) for most in (0, 16))
    assert 16 <= small.training_traces < whole.training_traces
    assert small.evaluation.traces == whole.evaluation.traces

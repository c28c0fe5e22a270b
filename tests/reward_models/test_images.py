"""Reward models and critics read only text: attempts whose policy saw images are refused, never read without them."""

import asyncio
from dataclasses import replace

import pytest
from PIL import Image as Pillow
from recorded_traces import attempts, record

from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import PromptMedia
from agent_r1.core.messages import Image, Message, Text
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Unscored
from agent_r1.reward_models.evaluation import read_traces
from agent_r1.reward_models.judge import transcript
from agent_r1.reward_models.network import RewardModel, RewardModelScorer
from agent_r1.training.config import CriticConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.train_critic import train_critic

IMAGE = Image.from_pil(Pillow.new("RGB", (6, 4), "red"))


def with_image(trajectory):
    first, *rest = trajectory.turns
    return replace(trajectory, turns=(replace(first, media=(PromptMedia(IMAGE, (range(1, 3),)),)), *rest))


class NoNetwork:
    """A network that has to score nothing."""


def test_a_run_whose_attempts_have_images_is_refused(tmp_path):
    run = record(tmp_path / "run", [with_image(one) for one in attempts(tasks=2)])
    with pytest.raises(InvalidInput, match="have images; name runs without"):
        read_traces([run], "em")
    with pytest.raises(InvalidInput, match="have images; name a run without"):
        train_critic(run, CriticConfig.model_validate({"run": str(run)}), SilentProgress())


def test_an_attempt_with_images_is_not_scored():
    group = [with_image(one) for one in attempts(tasks=1)]
    scorer = RewardModelScorer("quality", RewardModel(NoNetwork(), "trajectory", "bce"))
    scores = asyncio.run(scorer.score(group, Task("task-0", ())))
    assert {one["quality"] for one in scores} == {Unscored("the policy saw images, and reward models read only text")}


def test_a_judge_reads_a_line_in_place_of_an_image():
    trajectory = attempts(tasks=1)[0]
    first, *rest = trajectory.turns
    seen = replace(first, observation=(Message("tool", (Text("cropped"), IMAGE), call_id="call_0_0"),))
    assert f"cropped\n{IMAGE}" in transcript(replace(trajectory, turns=(seen, *rest)), 1000)

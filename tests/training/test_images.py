"""A run on pictures: it trains the vision tower too, resumes exactly, and its model opens in transformers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image as Pillow
from resuming import Whole, config_of, resume, train_with_images
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from vision_models import load_vision_model, write_vision_model

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Image, Message, Text
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.rewards.scoring import FunctionScorer, exact_match
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.training import run
from agent_r1.training.policy import Policy
from agent_r1.training.preflight import check_taskset
from agent_r1.training.progress import SilentProgress
from environments import shapes

SETTINGS = {
    "taskset": "shapes",
    "steps": 2,
    "groups_per_step": 2,
    "group_size": 2,
    "max_tokens": 6,
    "context": 2048,
    "evaluate_every": 0,
    "algorithm": "grpo",
}


def letters(trajectory: Trajectory, task: Task) -> float:
    """A reward that differs between the actions of a random policy."""
    return len(set(trajectory.last_text)) / 6


def pictures() -> TaskSet:
    scorer = FunctionScorer({"em": exact_match, "found": letters})
    return replace(shapes.build(0), rewards=("em", "found"), scorers=(scorer,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    taskset, place = pictures(), tmp_path_factory.mktemp("run")
    return Whole(taskset, place, train_with_images(taskset, place, {**SETTINGS, "model": str(folder)}))


def test_a_run_on_pictures_resumes_exactly(trained: Whole, tmp_path: Path) -> None:
    stopped = trained.stopped(1, tmp_path)
    assert resume(trained.taskset, stopped) == trained.result
    assert verify(stopped).is_valid
    with closing(RunReader(stopped)) as reader:
        images = {image.sha256 for one in reader.trajectories() for message in one.start for image in message.images}
        assert images and all(reader.image(each) is not None for each in images)


def test_the_trained_model_opens_in_transformers(trained: Whole, folder: Path) -> None:
    saved = str(trained.place / "whole" / "model")
    model, tokenizer = AutoModelForImageTextToText.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    processor = AutoImageProcessor.from_pretrained(saved, backend="pil")
    assert processor.patch_size == 8 and tokenizer.chat_template
    before = load_vision_model(folder).model.state_dict()
    moved = {name.split(".")[1] for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {"visual", "language_model"} <= moved


def test_a_text_model_refuses_pictures_before_the_run(tmp_path: Path) -> None:
    taskset = pictures()
    config = config_of(taskset, tmp_path / "run", {**SETTINGS, "model": "tiny-base"})
    with pytest.raises(
        InvalidInput, match=r"task train/0: got \[image/png 64x64 \w+\], and a model or an engine"
    ) as one:
        run.train(config, taskset, SilentProgress())
    assert "\n" not in str(one.value) and not (tmp_path / "run").exists()


def test_a_prompt_that_is_long_by_its_images_is_refused_before_the_run(trained: Whole, folder: Path) -> None:
    loaded = load_vision_model(folder)
    texts = [Task(f"text/{number}", "x" * 20) for number in range(20)]
    shown = Task("large", [Message("user", (Image.from_pil(Pillow.new("RGB", (160, 160))), Text("What?")))])
    taskset = replace(trained.taskset, tasks=lambda split: [shown, *texts])
    policy = Policy(loaded.model, loaded.renderer.tokenizer, loaded.renderer, 600, loaded.images, reads_images=True)
    check_taskset(policy, replace(taskset, tasks=lambda split: texts), ["train"])
    with pytest.raises(InvalidInput, match=r"task large: got a prompt of \d+ tokens"):
        check_taskset(policy, taskset, ["train"])

"""The tiny vision model for shapes: it is written from nothing, and learns the format and no colors."""

import random
from collections import Counter

import pytest
import torch
from vision_models import load_vision_model

from agent_r1.tasksets import shapes
from research.tiny_vision.__main__ import make
from research.tiny_vision.pretrain import TOOLS, make_example, random_conversation


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_script_writes_a_model_that_reads_the_pictures_of_shapes(tmp_path, capsys):
    assert make(tmp_path, "smolvlm", steps=2, width=32) > 0
    assert "step    1  loss" in capsys.readouterr().err
    loaded = load_vision_model(tmp_path)
    task = shapes.tasks("color", 0)[0]
    prompt = loaded.renderer.render(task.messages, TOOLS)
    (media,) = prompt.media
    assert len(media.indices) == loaded.images.pixels(media.image).count
    example = make_example(loaded.renderer, random_conversation(task, random.Random(0)))
    said = loaded.renderer.decode([example.ids[index] for index in example.targets])
    assert said.endswith("</answer><|im_end|>")


def test_the_answers_that_are_imitated_do_not_depend_on_the_picture():
    rng = random.Random(0)
    tasks = [task for task in shapes.tasks("color", 0) if task.data["answers"] == ("red",)]
    answers = Counter(random_conversation(task, rng)[-1].text for task in tasks for _ in range(10))
    assert set(answers) == {f"<answer>{color}</answer>" for color in shapes.COLORS}
    assert min(answers.values()) > 0.7 * answers.total() / len(shapes.COLORS)

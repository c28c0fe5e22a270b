"""The tiny vision model for shapes: it is written from nothing, and its pretraining shows no way to solve a task."""

import random
from collections import Counter

import pytest
import torch
from vision_models import load_vision_model

from environments import shapes
from research.tiny_vision.__main__ import make
from research.tiny_vision.models import TOOLS, Phase, make_example, plan, show


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def places():
    return [task for task in shapes.tasks("place", 0) if task.data["question"].place == "top left"]


def test_the_script_writes_a_model_that_reads_the_pictures_of_shapes(tmp_path, capsys):
    assert make(tmp_path, "smolvlm", phases=(Phase(1, names=1, shows=1), Phase(1, shows=1, plans=1)), width=32) > 0
    assert "step    1  loss" in capsys.readouterr().err
    loaded = load_vision_model(tmp_path)
    task = shapes.tasks("color", 0)[0]
    prompt = loaded.renderer.render(task.messages, TOOLS)
    (media,) = prompt.media
    assert len(media.indices) == loaded.images.pixels(media.image).count
    example = make_example(loaded.renderer, plan(task, random.Random(0)), TOOLS)
    said = loaded.renderer.decode([example.ids[index] for index in example.targets])
    assert said.endswith("</answer><|im_end|>")
    shown = make_example(loaded.renderer, show(task, random.Random(0), with_picture=False), ())
    assert '"name": "crop"' in loaded.renderer.decode([shown.ids[index] for index in shown.targets])


def test_the_calls_that_are_imitated_do_not_depend_on_the_question(places):
    rng = random.Random(0)
    calls = [call for task in places for _ in range(20) for call in plan(task, rng)[1].calls]
    crops = Counter(call.arguments["place"] for call in calls if call.name == "crop")
    assert set(crops) == set(shapes.PLACES)
    assert min(crops.values()) > 0.7 * crops.total() / len(shapes.PLACES)


def test_the_answer_that_is_imitated_is_right_only_if_the_last_picture_has_one_shape(places):
    rng, guesses = random.Random(0), Counter()
    for task in [*places, *places]:
        _, *looks, reply = plan(task, rng)
        arguments = dict(looks[0].calls[0].arguments) if looks else {}
        if "place" in arguments:
            assert reply.text == f"<answer>{task.data['question'].quarters[arguments['place']][1]}</answer>"
        else:
            guesses[reply.text == f"<answer>{task.data['answers'][0]}</answer>"] += 1
    assert guesses[False] > guesses[True]

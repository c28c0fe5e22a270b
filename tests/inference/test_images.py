"""Images in prompts and in tool results: the engine, the trainer and transformers compute the same probabilities."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch
from vision_models import KINDS, load_vision_model, picture, write_vision_model

from agent_r1.core.environment import Transition
from agent_r1.core.inference import PolicyVersion, Prompt, SamplingParams, WeightUpdate
from agent_r1.core.messages import Action, Message, Text, ToolCall
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Status
from agent_r1.data.batch import assemble_batch, select_trainable
from agent_r1.data.sequences import pack_per_turn, pack_prefix_tree
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.adapter import copy_sharing_frozen
from agent_r1.model.vision import PassImages
from agent_r1.rollout.session import Session
from agent_r1.trainer.forward_backward import ModelSet

QUESTION = (Message("user", (Text("Look: "), picture("red"), Text(" What is it?"))),)
RESULT = Message("tool", (picture("blue", 40, 64), Text("cropped")), call_id="call_0_0")


@pytest.fixture(scope="module", params=KINDS)
def vision(request, tmp_path_factory):
    return load_vision_model(write_vision_model(request.param, tmp_path_factory.mktemp(request.param)))


def make_engine(vision):
    config = EngineConfig(max_sequences=4, kv_cache_gib=0.1)
    return TorchEngine(copy_sharing_frozen(vision.model), 1024, config, images=vision.images)


async def three_turns(engine, renderer, index=0, question=QUESTION):
    """An attempt with an image in the prompt, one in the result of the first action, and a third action."""
    params = SamplingParams(max_tokens=6)
    session = Session(engine, renderer, params, 1024, AttemptId("run", "task", 0, index), seed=3)
    messages = question
    for observation in (RESULT, Message.user("Sure?"), None):
        action = await session.respond(messages)
        assert isinstance(action, Action), action
        outcome = () if observation is None else (observation,)
        session.observe(Transition(outcome, end="terminal" if observation is None else None))
        messages = (*messages, action.message, *outcome)
    return replace(session.trajectory("task", Status.COMPLETED, start=question), rewards={"em": 1.0})


def batch_of(*trajectories, packing=pack_prefix_tree):
    samples = select_trainable([Group(0, Task("task", "?"), tuple(trajectories))], {}).samples
    assert len(samples) == len(trajectories)
    return assemble_batch(samples, packing)


def trainer_logprobs(vision, batch, micro_tokens=4096):
    return ModelSet(vision.model, 1.0, micro_tokens, images=vision.images).logprobs(batch)


@pytest.fixture(scope="module")
def trajectory(vision):
    return asyncio.run(three_turns(make_engine(vision), vision.renderer))


def test_the_engine_and_the_trainer_agree_over_three_turns(vision, trajectory):
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert [len(turn.media) for turn in trajectory.turns] == [1, 1, 0]
    for packing in (pack_prefix_tree, pack_per_turn):
        batch = batch_of(trajectory, packing=packing)
        assert (trainer_logprobs(vision, batch) - batch.sampler_logprobs).abs().max() < 1e-5


def test_another_image_changes_the_probabilities(vision, trajectory):
    batch = batch_of(trajectory)
    (sequence,) = batch.sequences
    others = (picture("green"), picture("yellow", 40, 64))
    media = tuple(replace(one, image=other) for one, other in zip(sequence.media, others, strict=True))
    changed = replace(batch, sequences=(replace(sequence, media=media),))
    assert (trainer_logprobs(vision, changed) - batch.sampler_logprobs).abs().max() > 1e-4


async def sample(engine, vision, image, session):
    rendered = vision.renderer.render((Message("user", (image, Text("What is it?"))),))
    params = SamplingParams(max_tokens=4, seed=5)
    return await engine.generate(Prompt(rendered.token_ids, rendered.media), params, session_id=session)


def test_equal_tokens_with_another_image_share_no_cached_prefix(vision):
    async def run():
        engine = make_engine(vision)
        red, blue = picture("red", 96, 96), picture("blue", 96, 96)
        before = await sample(engine, vision, red, "one")
        other = await sample(engine, vision, blue, "one")
        together = await asyncio.gather(*(sample(engine, vision, image, None) for image in (red, blue, red)))
        return before, other, together, await sample(make_engine(vision), vision, blue, None)

    before, other, together, fresh = asyncio.run(run())
    # the text before the image is reused, so that the rest is computed in a pass of another shape
    assert other.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
    assert other.logprobs != pytest.approx(before.logprobs, abs=1e-3)
    assert [one.logprobs for one in together] == [before.logprobs, fresh.logprobs, before.logprobs]


@pytest.mark.parametrize("has_image", [True, False], ids=["beside an image", "beside text"])
def test_a_request_that_is_cancelled_when_a_step_begins_changes_no_other_request(vision, has_image):
    # The engine still prefills the cancelled request, so its image must stay until this step ends.
    async def run():
        engine, loop, cancelled = make_engine(vision), asyncio.get_running_loop(), threading.Event()
        step, first = engine._step, asyncio.create_task(sample(engine, vision, picture("red"), "a"))
        first.add_done_callback(lambda _: cancelled.set())

        def cancel_and_step():
            loop.call_soon_threadsafe(first.cancel)
            cancelled.wait()
            return step()

        engine._step = cancel_and_step
        if has_image:
            other = sample(engine, vision, picture("blue"), "b")
        else:
            other = engine.generate(Prompt((5, 6, 7)), SamplingParams(max_tokens=4, seed=1), session_id="b")
        outcome, completion = await asyncio.gather(first, other, return_exceptions=True)
        again = await sample(engine, vision, picture("red"), "c")
        fresh = await sample(make_engine(vision), vision, picture("red"), "c")
        return outcome, completion, again, fresh

    outcome, completion, again, fresh = asyncio.run(run())
    assert isinstance(outcome, asyncio.CancelledError) and len(completion.token_ids) == 4
    assert again.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_features_are_computed_again_after_new_weights(vision):
    async def run():
        engine = make_engine(vision)
        before = await sample(engine, vision, picture("red"), "one")
        changed = copy_sharing_frozen(vision.model)
        with torch.no_grad():
            for name, parameter in changed.named_parameters():
                if "vision" in name or "visual" in name or "connector" in name:
                    parameter.add_(0.05)
        await engine.update_weights(WeightUpdate(PolicyVersion(1, 1, None), "shared_memory", changed))
        after = await sample(engine, vision, picture("red"), "one")
        return (
            before,
            after,
            await sample(TorchEngine(changed, 1024, images=vision.images), vision, picture("red"), None),
        )

    before, after, fresh = asyncio.run(run())
    assert after.logprobs != before.logprobs
    assert after.token_ids == fresh.token_ids


def test_positions_are_those_of_transformers(vision):
    backbone = vision.model.base_model
    rendered = vision.renderer.render((*QUESTION, Message.assistant("A circle."), replace(RESULT, role="user")))
    ids = torch.tensor([rendered.token_ids])
    made = PassImages.of([rendered.media], ids.shape[1], vision.images, torch.device("cpu"))
    if vision.model.config.model_type == "smolvlm":
        assert made.positions is None
        return
    is_image = torch.zeros_like(ids)
    for one in rendered.media:
        is_image[0, one.indices] = 1
    grids = torch.cat([vision.images.pixels(one.image).arguments["image_grid_thw"] for one in rendered.media])
    assert torch.equal(made.positions, backbone.get_rope_index(ids, is_image, grids)[0])


def test_no_text_of_a_message_stands_for_an_image(vision):
    placeholder = vision.images.placeholder
    broken = ToolCall("call_0_0", "search", None, placeholder, "unreadable")
    call = ToolCall("call_1_0", "search", {"query": placeholder}, f'{{"query": "{placeholder}"}}')
    conversation = (
        Message.system(f"Images are {placeholder}."),
        *QUESTION,
        Message.assistant(f"I call {placeholder}", (broken,)),
        Message.tool(f"A page with {placeholder}\uf8ff\ufffc\uf8ff.", "call_0_0"),
        Message.assistant("", (call,)),
        RESULT,
        Message.assistant("Done."),
        Message.user(f"{placeholder}?"),
    )
    rendered = vision.renderer.render(conversation)
    assert [one.image for one in rendered.media] == [*QUESTION[0].images, *RESULT.images]
    for one, text in zip(rendered.media, ("Look: ", "<tool_response>\n"), strict=True):
        before = vision.renderer.decode(rendered.token_ids[: one.indices[0]])
        assert text in before[-70:], "an image is at its own place"
    assert "A page with" in rendered.text and "\uf8ff\ufffc\uf8ff." in rendered.text
    assert rendered.text.count(placeholder) == 2 + 1 + 1 + 1  # the images, and the texts of system and policy
    again = type(vision.renderer)(vision.renderer.tokenizer, images=vision.images).render(conversation)
    assert again == rendered


def test_a_call_that_holds_a_placeholder_and_cannot_be_read_does_not_end_the_attempt(vision):
    text = f'<tool_call>{{"name": {vision.images.placeholder}</tool_call>'
    ids = (*vision.renderer.encode(text), vision.renderer.end_token_id)
    action = vision.renderer.parse(ids)
    assert action.message.calls[0].error is not None
    prompt = vision.renderer.render(QUESTION)
    bridged = vision.renderer.bridge_to_next_turn(prompt, QUESTION, action, ids, (RESULT,))
    whole = vision.renderer.render((*QUESTION, action.message, RESULT))
    assert prompt.token_ids + ids + bridged.token_ids == whole.token_ids
    assert [one.image for one in bridged.media] == list(RESULT.images)
    assert bridged.media[0].moved(len(prompt.token_ids) + len(ids)) == whole.media[1]

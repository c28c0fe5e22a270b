"""The embedded engine: exact log-probabilities, independence from batch and timing, weight updates, and failures."""

import asyncio
import copy
import random

import pytest
import torch

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import PolicyVersion, Prompt, SamplingParams, StopCondition, WeightUpdate
from agent_r1.inference import model_runner
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.model_runner import ModelRunner
from agent_r1.inference.torch_engine import TorchEngine

END = 3
CONFIG = EngineConfig(max_sequences=8, decode_step="torch")  # the native step: test_native_decode.py


def engine_of(model, config=CONFIG, context=512):
    return TorchEngine(copy.deepcopy(model), context, config)


def prompts(count, seed=0):
    rng = random.Random(seed)
    return [tuple(rng.randrange(50) for _ in range(rng.randrange(1, 90))) for _ in range(count)]


async def converse(engine, name, prompt, turns=3, delay=0.0, temperature=0.7):
    """Run several turns in one session, with observations between them; return [(state, completion)]."""
    rng, state, out = random.Random(name), prompt, []
    for turn in range(turns):
        sampling = SamplingParams(temperature, max_tokens=12, stop_token_ids=(END,), seed=10 * int(name) + turn)
        completion = await engine.generate(Prompt(state), sampling, session_id=name)
        out.append((state, completion))
        observed = tuple(rng.randrange(50) for _ in range(rng.randrange(1, 30)))
        state = state + completion.token_ids + observed
        await asyncio.sleep(delay * rng.random())
    await engine.release(name)
    return out


def converse_together(model, names, delay=0.0, config=CONFIG):
    """Run the named conversations at the same time; return their turns by name."""

    async def run():
        engine = engine_of(model, config)
        starts = dict(zip([str(i) for i in range(64)], prompts(64), strict=True))
        turns = await asyncio.gather(*(converse(engine, name, starts[name], delay=delay) for name in names))
        await engine.close()
        return dict(zip(names, turns, strict=True))

    return asyncio.run(run())


@torch.no_grad()
def plain_logprobs(model, state, ids, temperature):
    """Compute log-probabilities by one forward pass over the whole sequence, with the library's own attention."""
    logits = model(torch.tensor([state + ids])).logits[0].float() / temperature
    rows = torch.arange(len(state) - 1, len(state) + len(ids) - 1)
    return torch.log_softmax(logits, -1)[rows, torch.tensor(ids)]


def largest_gap(model, conversations, temperature=0.7):
    """Return the largest difference between the engine's log-probabilities and those of a plain forward pass."""
    gaps = [
        (plain_logprobs(model, state, done.token_ids, temperature) - torch.tensor(done.logprobs)).abs().max()
        for turns in conversations.values()
        for state, done in turns
    ]
    return float(max(gaps))


@pytest.fixture(scope="module")
def conversations(tiny_model):
    return converse_together(tiny_model, [str(i) for i in range(64)])


def test_logprobs_equal_a_plain_forward_pass_over_several_turns_with_a_kv_cache(tiny_model, conversations):
    assert sum(len(turns) for turns in conversations.values()) == 192
    assert (
        largest_gap(tiny_model, conversations) < 1e-5 < 1e-3 < largest_gap(tiny_model, conversations, temperature=0.8)
    )


def test_a_session_alone_gives_the_same_bits_as_among_63_others(tiny_model, conversations):
    assert converse_together(tiny_model, ["17"])["17"] == conversations["17"]


def test_the_duration_of_tool_calls_changes_no_bit(tiny_model, conversations):
    assert converse_together(tiny_model, [str(i) for i in range(64)], delay=0.02) == conversations


def test_a_rewritten_context_is_prefilled_again(tiny_model):
    async def run():
        engine = engine_of(tiny_model)
        shared = tuple(range(5, 45))
        outs = []
        for state in (shared, (*shared[:20], 9, 9, 9), shared, (7, *shared)):
            done = await engine.generate(Prompt(state), SamplingParams(max_tokens=5, seed=1), session_id="same session")
            outs.append((state, done))
        other = await engine.generate(Prompt(shared), SamplingParams(max_tokens=5, seed=1), session_id="other session")
        await engine.close()
        return {"all": [*outs, (shared, other)]}

    assert largest_gap(tiny_model, asyncio.run(run()), temperature=1.0) < 1e-5


def test_greedy_sampling_and_a_small_top_p_take_the_most_probable_token(tiny_model):
    async def run(sampling):
        engine = engine_of(tiny_model)
        done = await engine.generate(Prompt((1, 2, 4)), sampling)
        await engine.close()
        return done.token_ids

    greedy = asyncio.run(run(SamplingParams(temperature=0, max_tokens=8)))
    expected = list(tiny_model.generate(torch.tensor([[1, 2, 4]]), max_new_tokens=8, do_sample=False)[0, 3:])
    assert list(greedy) == expected
    assert asyncio.run(run(SamplingParams(top_p=1e-9, max_tokens=8, seed=5))) == greedy
    assert asyncio.run(run(SamplingParams(max_tokens=8, seed=5))) != greedy


def test_an_update_during_a_generation_starts_a_version_span_with_the_new_logprobs(tiny_model):
    changed = copy.deepcopy(tiny_model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.3)
    prompt = prompts(1, seed=9)[0]

    async def run():
        engine = engine_of(tiny_model)
        task = asyncio.create_task(
            engine.generate(Prompt(prompt), SamplingParams(max_tokens=200, seed=4), session_id="s")
        )
        while engine.num_generated_tokens < 20:
            await asyncio.sleep(0)
        await engine.update_weights(WeightUpdate(PolicyVersion(1, 1), "shared_memory", changed))
        done = await task
        await engine.close()
        return done

    done = asyncio.run(run())
    assert [span.version for span in done.version_spans] == [0, 1]
    switch = done.version_spans[1].start
    assert 0 < switch < 200
    before = plain_logprobs(tiny_model, prompt, done.token_ids, 1.0)[:switch]
    after = plain_logprobs(changed, prompt, done.token_ids, 1.0)[switch:]
    assert torch.allclose(torch.cat([before, after]), torch.tensor(done.logprobs), atol=1e-5)


def test_an_update_that_does_not_fit_is_an_error_and_the_engine_continues(tiny_model):
    async def run():
        engine = engine_of(tiny_model)
        with pytest.raises(EngineError, match="do not fit"):
            await engine.update_weights(WeightUpdate(PolicyVersion(1, 1), "shared_memory", torch.nn.Linear(2, 2)))
        with pytest.raises(EngineError, match="a module in shared memory"):
            await engine.update_weights(WeightUpdate(PolicyVersion(1, 1), "safetensors", "somewhere"))
        done = await engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=3))
        await engine.close()
        return done

    assert len(asyncio.run(run()).token_ids) == 3


def test_weights_that_are_not_finite_fail_the_generation_but_not_the_engine(tiny_model):
    broken = copy.deepcopy(tiny_model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))

    async def run():
        engine = engine_of(tiny_model)
        await engine.update_weights(WeightUpdate(PolicyVersion(1, 1), "shared_memory", broken))
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=3), session_id="a")
        await engine.update_weights(WeightUpdate(PolicyVersion(2, 2), "shared_memory", tiny_model))
        done = await engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=3), session_id="a")
        await engine.close()
        return done

    assert len(asyncio.run(run()).token_ids) == 3


def test_a_cancelled_generation_frees_its_slot(tiny_model):
    async def run():
        engine = engine_of(tiny_model, EngineConfig(max_sequences=1, kv_cache_gib=1e-9), context=2 * 10**6)
        unfinished = asyncio.create_task(
            engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=10**6), session_id="unfinished")
        )
        while engine.num_generated_tokens < 3:
            await asyncio.sleep(0)
        unfinished.cancel()
        await asyncio.gather(unfinished, return_exceptions=True)
        await engine.release("unfinished")
        done = await asyncio.wait_for(
            engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=3), session_id="next"), 10
        )
        await engine.close()
        return done

    assert len(asyncio.run(run()).token_ids) == 3


def test_a_cached_prefix_is_not_copied_from_a_slot_whose_context_was_rewritten(tiny_model):
    shared, other = tuple(range(5, 45)), tuple(range(44, 4, -1))
    sampling = SamplingParams(max_tokens=5, seed=1)

    async def run():
        engine = engine_of(tiny_model)
        await engine.generate(Prompt(shared), sampling, session_id="a")
        both = [(shared, "b"), (other, "a")]
        done = await asyncio.gather(*(engine.generate(Prompt(ids), sampling, session_id=name) for ids, name in both))
        await engine.close()
        return {"all": [(ids, completion) for (ids, _), completion in zip(both, done, strict=True)]}

    assert largest_gap(tiny_model, asyncio.run(run()), temperature=1.0) < 1e-5


def test_a_stop_condition_that_raises_fails_its_own_request_only(tiny_model):
    def is_met(ids):
        return 1 / (4 - len(ids)) < 0

    async def run():
        engine = engine_of(tiny_model)
        params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(3)]
        alone = [await engine.generate(Prompt((1, 5 + seed)), sampling) for seed, sampling in enumerate(params)]
        broken = engine.generate(
            Prompt((1, 2)), SamplingParams(max_tokens=12, stop_condition=StopCondition(("x",), is_met))
        )
        others = (engine.generate(Prompt((1, 5 + seed)), sampling) for seed, sampling in enumerate(params))
        failed, *together = await asyncio.gather(broken, *others, return_exceptions=True)
        await engine.close()
        assert isinstance(failed, EngineError) and "the stop condition raised ZeroDivisionError" in str(failed)
        assert together == alone

    asyncio.run(run())


def test_after_a_failed_prefill_the_cache_is_not_relied_on(tiny_model, monkeypatch):
    prompt = tuple(range(5, 45))

    async def run():
        engine = engine_of(tiny_model)
        with monkeypatch.context() as broken:
            broken.setattr(ModelRunner, "prefill", lambda *_: 1 / 0)
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await engine.generate(Prompt(prompt), SamplingParams(max_tokens=5), session_id="a")
        outs = [
            (prompt, await engine.generate(Prompt(prompt), SamplingParams(max_tokens=5), session_id=name))
            for name in "ab"
        ]
        await engine.close()
        return {"all": outs}

    assert largest_gap(tiny_model, asyncio.run(run()), temperature=1.0) < 1e-5


@pytest.mark.parametrize("large_from", [model_runner.LARGE_MODEL, 0], ids=["small", "large"])
def test_prompts_with_the_same_beginning_compute_it_once_with_the_same_bits(tiny_model, monkeypatch, large_from):
    monkeypatch.setattr(model_runner, "LARGE_MODEL", large_from)
    beginning = tuple(index % 50 for index in range(256))
    other = (*beginning[:128], 7, *beginning[129:])  # shares 128 tokens with the first prompts
    prompts = [(*beginning, 5, 6), (*beginning, 8, 9), (*beginning, 8, 9), (*beginning, 1), (*other, 2, 3)]
    computed = []
    prefill = ModelRunner.prefill

    def count_tokens(runner, chunks):
        computed.append(sum(len(chunk.token_ids) for chunk in chunks))
        prefill(runner, chunks)

    monkeypatch.setattr(ModelRunner, "prefill", count_tokens)

    async def complete(*prompts):
        engine = engine_of(tiny_model)
        params = SamplingParams(max_tokens=8, seed=0)
        done = await asyncio.gather(*(engine.generate(Prompt(ids), params) for ids in prompts))
        await engine.close()
        return done

    together = asyncio.run(complete(*prompts))
    # The last token of a prompt is not prefilled. In chunks of 64 tokens, the last prompt shares 128 tokens.
    _probe, *computed = computed
    assert sum(computed) == 257 + 1 + 0 + 0 + 257 - (0 if large_from else 128)
    assert together == [completion for ids in prompts for completion in asyncio.run(complete(ids))]

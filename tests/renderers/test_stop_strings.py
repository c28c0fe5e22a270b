"""Formats whose actions end with a text: generation stops with the token that completes it; nothing else changes."""

import asyncio
import copy
from dataclasses import replace

import pytest
from chat_templates import SEARCH, real_tokenizer, tokenizer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import RolloutContext
from agent_r1.core.inference import Prompt, SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolSpec
from agent_r1.core.trajectory import Status
from agent_r1.envs import ToolEnv
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.renderers.config import TagsConfig
from agent_r1.renderers.formats.detect import TEMPLATE_FORMATS, open_renderer
from agent_r1.renderers.stop_strings import StopStringMatcher
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.scripted_engine import ScriptedEngine
from agent_r1.tools.function_tool import tool

PYTHON = ToolSpec(
    "python", "Run code.", {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
)
TOOLS = (SEARCH, PYTHON)


def tags_of(*pieces, tags=None):
    """Bytes, and tokens of several characters; no template."""
    written = [piece.replace("\n", "Ċ") for piece in pieces]
    merges = list(dict.fromkeys((piece[:end], piece[end]) for piece in written for end in range(1, len(piece))))
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(known)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    return open_renderer(fast, "tags", tags)


def stopped(renderer, text, tools=TOOLS):
    """What an engine would have sampled of a text, by asking after every token."""
    ids, ending = renderer.encode(text), renderer.stop_condition(tools)
    count = next((count for count in range(1, len(ids)) if ending.is_met(ids[:count])), len(ids))
    return renderer.tokenizer.decode(list(ids[:count]))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("I look. <search>Alba</search> and so on", "I look. <search>Alba</search>"),
        ("<search>日本 é</search>日", "<search>日本 é</search>"),
        ("I know. <answer>Bruno</answer>\n\nQuestion:", "I know. <answer>Bruno</answer>"),
        (
            "<think>a<search>x</search></think><search>y</search>z",
            "<think>a<search>x</search></think><search>y</search>",
        ),
        ("no call </search> yet <search>x</search> z", "no call </search> yet <search>x</search>"),
        ("<search>a <answer>b</answer> c</search> z", "<search>a <answer>b</answer> c</search>"),
        ("So:\n```python\nprint(1)\n```\nIt gives", "So:\n```python\nprint(1)\n```\n"),
        ("```\nplain\n```\n```python\nx\n```\n z", "```\nplain\n```\n```python\nx\n```\n"),
        ("```python\nx = '''\n```json\n{}'''\n```\n z", "```python\nx = '''\n```json\n{}'''\n```\n"),
        ("```python\nx\n``` \nIt gives", "```python\nx\n``` \n"),
        ("```python\nx\n```\t \t\nIt gives", "```python\nx\n```\t \t\n"),
        ("```python\nx = '''\n``` y'''\n```  \n z", "```python\nx = '''\n``` y'''\n```  \n"),
        ("nothing ends here", "nothing ends here"),
    ],
)
def test_a_generation_stops_with_the_byte_that_ends_the_action_and_not_before(text, kept):
    renderer = open_renderer(tokenizer_of(None), "tags")
    assert stopped(renderer, text) == kept
    ids = renderer.encode(kept)
    cut = renderer.tokenizer.decode(list(ids[renderer.action_length(ids, TOOLS) :]))
    assert not cut.strip(" \t") or cut.strip(" \t") == "\n"  # of a fence, what ends its line; else nothing


def test_a_tag_whose_characters_are_spread_over_tokens_is_seen_when_it_is_whole():
    renderer = open_renderer(tokenizer_of(None), "tags", TagsConfig(names={"search": "поиск日"}))
    assert stopped(renderer, "<поиск日>где</поиск日> a") == "<поиск日>где</поиск日>"
    merged = tags_of("</", "sea", "rch", "rch>", ">.", "<s")
    assert stopped(merged, "<search>a</search> b") == "<search>a</search>"


def test_backticks_are_no_end_before_it_is_known_what_follows_them():
    renderer = tags_of("\n```", tags=TagsConfig(names={"python": "```"}))
    assert stopped(renderer, "```\nx\n```json\ny\n```\n z") == "```\nx\n```json\ny\n```\n"


def test_a_token_that_says_more_than_the_tag_is_kept_whole():
    renderer = tags_of(">\n", ">.")
    assert stopped(renderer, "<search>a</search>\n\n<information>") == "<search>a</search>\n"
    assert stopped(renderer, "<search>a</search>. So") == "<search>a</search>."


@pytest.mark.parametrize("known", TEMPLATE_FORMATS, ids=lambda known: known.name)
def test_formats_whose_calls_end_with_tokens_ask_for_nothing(known):
    assert known().stop_strings(TOOLS) == ()


def test_what_asking_costs_does_not_grow_with_the_tokens():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "".join(map(chr, ids))

    tail, text = StopStringMatcher(("</search>",), decode), "<b>" * 1000 + "</search>"
    assert [tail.matches(list(map(ord, text[:end]))) for end in range(1, len(text) + 1)] == [False] * 3008 + [True]
    assert max(decoded) == tail.window and len(decoded) == len(set(text)) + text.count(">")


# ---- through the embedded engine

WORDS = ["<search>", "</search>", "</", "search", ">", ">Ċ", "a", "Ġb", "Ċ", "<answer>", "</answer>", "Ã", "©"]


def fifty():
    """A chat over a vocabulary of the size of the tiny model's, full of tags, whole and in parts."""
    pieces = [*WORDS, *(f"w{index}" for index in range(50 - len(WORDS)))]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return open_renderer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"), "tags")


def said(model, ending, names):
    async def one(engine, name):
        sampling = SamplingParams(1.0, max_tokens=120, seed=name, stop_condition=ending)
        return await engine.generate(Prompt((0, 6 + name % 40)), sampling, session_id=str(name))

    async def run():
        engine = TorchEngine(copy.deepcopy(model), 512, EngineConfig(max_sequences=8))
        done = await asyncio.gather(*(one(engine, name) for name in names))
        await engine.close()
        return dict(zip(names, done, strict=True))

    return asyncio.run(run())


def test_the_engine_samples_the_same_tokens_and_fewer(tiny_model):
    renderer, names = fifty(), range(40)
    tools = (SEARCH,)
    whole, ended = said(tiny_model, None, names), said(tiny_model, renderer.stop_condition(tools), names)
    lasts = set()
    for name in names:
        before, now = whole[name], ended[name]
        count = len(now.token_ids)
        assert (before.token_ids[:count], before.logprobs[:count]) == (now.token_ids, now.logprobs)
        assert now.finish_reason == ("stop" if count < 120 else before.finish_reason)
        assert renderer.action_length(now.token_ids, tools) == count
        if count < 120:
            lasts.add(renderer.tokenizer.decode(list(now.token_ids[-1:])))
            assert not renderer.stop_condition(tools).is_met(now.token_ids[:-1])
    assert {"</search>", "</answer>", ">", ">\n"} >= lasts and len(lasts) >= 2
    assert sum(len(done.token_ids) for done in ended.values()) < 0.8 * sum(
        len(done.token_ids) for done in whole.values()
    )
    assert said(tiny_model, renderer.stop_condition(tools), [17]) == {17: ended[17]}  # whoever is beside it


# ---- the seam, where no token ended the turn


@tool
def search(query: str) -> str:
    """Look pages up.

    Args:
        query: what for.
    """
    return f"A page on {query}."


def lived(renderer, reply):
    agent = Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=200), 4000)
    task = Task("t", (Message.user("Who?"),), "Bruno", "train")
    env = ToolEnv([search], max_turns=4)
    return asyncio.run(AgentLoop(agent, env).run(task, RolloutContext(AttemptId("r", "t", 0, 0), 0)))[0]


CALL = "I look.\n\n<search>Alba</search>\n\n<information>made up</information>\n\n<answer>Nobody</answer>"


@pytest.mark.parametrize("pieces", [(), (">\n",), (">\n", ">\n\n")], ids=["a token each", "one break", "two breaks"])
def test_an_invented_result_is_never_sampled_and_the_true_one_follows_as_the_template_writes_it(pieces):
    renderer = tags_of(*pieces)
    trajectory = lived(renderer, lambda prompt: CALL if "A page on" not in prompt else "<answer>Bruno</answer> and")
    first, second = trajectory.turns
    assert trajectory.status is Status.COMPLETED and (first.finish_reason, second.finish_reason) == ("stop", "stop")
    assert renderer.tokenizer.decode(list(first.action_ids)).rstrip() == "I look.\n\n<search>Alba</search>"
    assert len(first.logprobs) == len(first.action_ids) == len(renderer.encode(first.action.text))
    assert first.call_ends == (len(first.action_ids) - 1,)
    seen = (*first.new_ids, *first.action_ids, *second.new_ids)
    assert second.parent == first.index and "made up" not in renderer.tokenizer.decode(list(seen))
    messages = (*trajectory.start, first.action.message, *first.observation)
    assert renderer.tokenizer.decode(list(seen)) == renderer.render_text(
        messages, ToolEnv([search]).tools, add_generation_prompt=True
    )


def test_an_action_with_empty_lines_that_the_template_words_otherwise_stands_once_in_the_context():
    renderer, said = open_renderer(tokenizer_of(None), "tags"), (Message.user("Who?"),)
    ids = renderer.encode("I look.\n\n```py\nprint(1)\n\nprint(2)\n```")
    grown = renderer.bridge_to_next_turn(
        renderer.render(said, TOOLS),
        said,
        renderer.parse(ids, 0, TOOLS),
        ids,
        (Message.tool("1 2", "call_0_0"),),
        TOOLS,
    )
    assert grown is not None
    assert renderer.tokenizer.decode(list(grown.token_ids)) == "\n\n<information>1 2</information>\n\n"


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "llama3_1"])
@pytest.mark.parametrize("after", ["", "\n", "\n\n", "."])
def test_where_a_template_ends_turns_with_a_token_the_bridge_has_it(name, after):
    renderer, said = open_renderer(real_tokenizer(name), "tags"), (Message.user("Who?"),)
    ids = renderer.encode(f"I look.\n\n<search>Alba</search>{after}")
    action, page = renderer.parse(ids, 0, TOOLS), Message.tool("A page.", "call_0_0")
    grown = renderer.bridge_to_next_turn(renderer.render(said, TOOLS), said, action, ids, (page,), TOOLS)
    assert grown is not None
    assert (
        grown.token_ids[0] == renderer.end_token_id
        and renderer.tokenizer.decode(list(grown.token_ids)).count("Alba") == 0
    )


def test_the_ending_is_part_of_no_other_sampling():
    asked = []

    class Listening(ScriptedEngine):
        async def generate(self, prompt, params, *, session_id=None):
            asked.append(params.stop_condition)
            return await super().generate(prompt, replace(params, stop_condition=None), session_id=session_id)

    task, env = Task("t", (Message.user("Who?"),), "Bruno", "train"), ToolEnv([search], max_turns=1)
    for renderer in (tags_of(), TemplateRenderer(real_tokenizer("qwen2_5"))):
        agent = Agent(Listening(renderer, lambda prompt: CALL), renderer, SamplingParams(max_tokens=200), 4000)
        asyncio.run(AgentLoop(agent, env).run(task, RolloutContext(AttemptId("r", "t", 0, 0), 0)))[0]
    assert [None if ending is None else ending.strings for ending in asked] == [("</answer>", "</search>"), None]

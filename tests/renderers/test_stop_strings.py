"""Formats that end actions by text: generation stops at the token that completes it, and nothing else changes."""

import asyncio
import copy
from dataclasses import replace

import pytest
from chat_templates import SEARCH, real_tokenizer, tokenizer_of
from tests_tokenizer import hermes_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1.core.environment import RolloutContext
from agent_r1.core.inference import Prompt, SamplingParams
from agent_r1.core.messages import Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.renderers.formats.detect import TEMPLATE_FORMATS, open_renderer
from agent_r1.renderers.formats.tags import TagsConfig
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.renderers.text_decoding import StopStringMatcher, with_stop_strings
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.tools.function_tool import tool

PYTHON = ToolSpec(
    "python", "Run code.", {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
)
TOOLS = (SEARCH, PYTHON)


def tags_of(*pieces, tags=None):
    """Return a renderer without a template; its tokens are bytes and the given pieces."""
    written = [piece.replace("\n", "Ċ") for piece in pieces]
    merges = list(dict.fromkeys((piece[:end], piece[end]) for piece in written for end in range(1, len(piece))))
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(known)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    return open_renderer(fast, "tags", tags)


def stopped(renderer, text, tools=TOOLS, strings=()):
    """Return the part of a text that an engine would sample, if it checks after every token."""
    ids, condition = renderer.encode(text), renderer.stop_condition(tools)
    if strings:
        condition = with_stop_strings(condition, strings, renderer.decode)
    count = next((count for count in range(1, len(ids)) if condition.is_met(ids[:count])), len(ids))
    return renderer.tokenizer.decode(list(ids[:count]))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("I look. Stop. <search>Alba</search> and so on", "I look. Stop."),
        ("I look. <search>Alba</search> Stop. And", "I look. <search>Alba</search>"),
        ("<search>Stop.</search>", "<search>Stop."),
    ],
)
def test_strings_of_a_request_end_an_action_beside_those_of_the_format(text, kept):
    assert stopped(tags_of(), text, strings=("Stop.", "!!")) == kept


def test_without_a_format_that_ends_actions_only_the_strings_of_a_request_do():
    hermes = TemplateRenderer(hermes_tokenizer())
    assert stopped(hermes, "I look. Stop. More", strings=("Stop.",)) == "I look. Stop."


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
def test_generation_stops_at_the_byte_that_ends_the_action(text, kept):
    renderer = open_renderer(tokenizer_of(None), "tags")
    assert stopped(renderer, text) == kept
    ids = renderer.encode(kept)
    cut = renderer.tokenizer.decode(list(ids[renderer.action_length(ids, TOOLS) :]))
    assert not cut.strip(" \t") or cut.strip(" \t") == "\n"  # a fence is cut before the end of its line


def test_a_tag_spread_over_tokens_stops_when_complete():
    renderer = open_renderer(tokenizer_of(None), "tags", TagsConfig(names={"search": "поиск日"}))
    assert stopped(renderer, "<поиск日>где</поиск日> a") == "<поиск日>где</поиск日>"
    merged = tags_of("</", "sea", "rch", "rch>", ">.", "<s")
    assert stopped(merged, "<search>a</search> b") == "<search>a</search>"


def test_backticks_end_a_fence_only_after_the_next_character():
    renderer = tags_of("\n```", tags=TagsConfig(names={"python": "```"}))
    assert stopped(renderer, "```\nx\n```json\ny\n```\n z") == "```\nx\n```json\ny\n```\n"


def test_a_token_with_text_beyond_the_tag_is_kept_whole():
    renderer = tags_of(">\n", ">.")
    assert stopped(renderer, "<search>a</search>\n\n<information>") == "<search>a</search>\n"
    assert stopped(renderer, "<search>a</search>. So") == "<search>a</search>."


@pytest.mark.parametrize("known", TEMPLATE_FORMATS, ids=lambda known: known.name)
def test_template_formats_have_no_stop_strings(known):
    assert known().stop_strings(TOOLS) == ()


def test_the_cost_of_matching_does_not_grow_with_the_tokens():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "".join(map(chr, ids))

    tail, text = StopStringMatcher(("</search>",), decode), "<b>" * 1000 + "</search>"
    assert [tail.matches(list(map(ord, text[:end]))) for end in range(1, len(text) + 1)] == [False] * 3008 + [True]
    assert max(decoded) == tail.window and len(decoded) == len(set(text)) + text.count(">")


# ---- with the torch engine

WORDS = ["<search>", "</search>", "</", "search", ">", ">Ċ", "a", "Ġb", "Ċ", "<answer>", "</answer>", "Ã", "©"]


def renderer_of_50_tokens():
    """Return a renderer for the tiny model's 50 tokens, with whole tags and parts of tags."""
    pieces = [*WORDS, *(f"w{index}" for index in range(50 - len(WORDS)))]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return open_renderer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"), "tags")


def completions(model, stop_condition, names):
    async def one(engine, name):
        sampling = SamplingParams(1.0, max_tokens=120, seed=name, stop_condition=stop_condition)
        return await engine.generate(Prompt((0, 6 + name % 40)), sampling, session_id=str(name))

    async def run():
        engine = TorchEngine(copy.deepcopy(model), 512, EngineConfig(max_sequences=8))
        done = await asyncio.gather(*(one(engine, name) for name in names))
        await engine.close()
        return dict(zip(names, done, strict=True))

    return asyncio.run(run())


def test_a_stop_condition_shortens_completions_without_changing_tokens(tiny_model):
    renderer, names = renderer_of_50_tokens(), range(40)
    tools = (SEARCH,)
    whole, shortened = (
        completions(tiny_model, None, names),
        completions(tiny_model, renderer.stop_condition(tools), names),
    )
    lasts = set()
    for name in names:
        before, now = whole[name], shortened[name]
        count = len(now.token_ids)
        assert (before.token_ids[:count], before.logprobs[:count]) == (now.token_ids, now.logprobs)
        assert now.finish_reason == ("stop" if count < 120 else before.finish_reason)
        assert renderer.action_length(now.token_ids, tools) == count
        if count < 120:
            lasts.add(renderer.tokenizer.decode(list(now.token_ids[-1:])))
            assert not renderer.stop_condition(tools).is_met(now.token_ids[:-1])
    assert {"</search>", "</answer>", ">", ">\n"} >= lasts and len(lasts) >= 2
    assert sum(len(done.token_ids) for done in shortened.values()) < 0.8 * sum(
        len(done.token_ids) for done in whole.values()
    )
    assert completions(tiny_model, renderer.stop_condition(tools), [17]) == {
        17: shortened[17]
    }  # also alone in the batch


# ---- the bridge if no token shortened the turn


@tool
def search(query: str) -> str:
    """Look pages up.

    Args:
        query: what for.
    """
    return f"A page on {query}."


def run_attempt(renderer, reply):
    agent = Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=200), 4000)
    task = Task("t", (Message.user("Who?"),), {"answers": ("Bruno",)}, "train")
    env = ToolEnv([search], max_turns=4)
    return asyncio.run(AgentLoop(agent, env).run(task, RolloutContext(AttemptId("r", "t", 0, 0), 0)))[0]


CALL = "I look.\n\n<search>Alba</search>\n\n<information>made up</information>\n\n<answer>Nobody</answer>"


@pytest.mark.parametrize("pieces", [(), (">\n",), (">\n", ">\n\n")], ids=["a token each", "one break", "two breaks"])
def test_an_invented_result_is_not_sampled_and_the_real_one_is_rendered(pieces):
    renderer = tags_of(*pieces)
    trajectory = run_attempt(
        renderer, lambda prompt: CALL if "A page on" not in prompt else "<answer>Bruno</answer> and"
    )
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


def test_an_action_that_the_template_words_differently_appears_once():
    renderer, messages = open_renderer(tokenizer_of(None), "tags"), (Message.user("Who?"),)
    ids = renderer.encode("I look.\n\n```py\nprint(1)\n\nprint(2)\n```")
    bridge = renderer.bridge_to_next_turn(
        renderer.render(messages, TOOLS),
        messages,
        renderer.parse(ids, 0, TOOLS),
        ids,
        (Message.tool("1 2", "call_0_0"),),
        TOOLS,
    )
    assert bridge is not None
    assert renderer.tokenizer.decode(list(bridge.token_ids)) == "\n\n<information>1 2</information>\n\n"


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "llama3_1"])
@pytest.mark.parametrize("after", ["", "\n", "\n\n", "."])
def test_the_bridge_has_the_end_token_of_the_template(name, after):
    renderer, messages = open_renderer(real_tokenizer(name), "tags"), (Message.user("Who?"),)
    ids = renderer.encode(f"I look.\n\n<search>Alba</search>{after}")
    action, page = renderer.parse(ids, 0, TOOLS), Message.tool("A page.", "call_0_0")
    bridge = renderer.bridge_to_next_turn(renderer.render(messages, TOOLS), messages, action, ids, (page,), TOOLS)
    assert bridge is not None
    assert (
        bridge.token_ids[0] == renderer.end_token_id
        and renderer.tokenizer.decode(list(bridge.token_ids)).count("Alba") == 0
    )


def test_only_text_formats_set_a_stop_condition():
    conditions = []

    class RecordingEngine(ScriptedEngine):
        async def generate(self, prompt, params, *, session_id=None):
            conditions.append(params.stop_condition)
            return await super().generate(prompt, replace(params, stop_condition=None), session_id=session_id)

    task, env = Task("t", (Message.user("Who?"),), {"answers": ("Bruno",)}, "train"), ToolEnv([search], max_turns=1)
    for renderer in (tags_of(), TemplateRenderer(real_tokenizer("qwen2_5"))):
        agent = Agent(RecordingEngine(renderer, lambda prompt: CALL), renderer, SamplingParams(max_tokens=200), 4000)
        asyncio.run(AgentLoop(agent, env).run(task, RolloutContext(AttemptId("r", "t", 0, 0), 0)))[0]
    assert [None if condition is None else condition.strings for condition in conditions] == [
        ("</answer>", "</search>"),
        None,
    ]

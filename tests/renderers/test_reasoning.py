"""Where a thought begins and ends, and that nothing in it is done or said."""

import pytest
from chat_templates import SEARCH, real_tokenizer

from agent_r1.core.messages import Message
from agent_r1.renderers.formats.detect import open_renderer
from agent_r1.renderers.formats.tool_format import split_reasoning

HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>'
QWEN35 = "<tool_call>\n<function=search>\n<parameter=query>\n%s\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"


def parsed(name, text):
    renderer = open_renderer(real_tokenizer(name))
    return renderer.parse(renderer.encode(text), 0, (SEARCH,)).message


@pytest.mark.parametrize(
    ("name", "begun", "call"),
    [("qwen3", "<think>\n", HERMES), ("qwen3_5_think", "", QWEN35), ("glm4moe", "<think>", GLM)],
)
def test_of_a_thought_that_was_cut_nothing_is_done_or_said(name, begun, call):
    thought = f"I might call {call % 'x'} or say <answer>X</answer>"
    message = parsed(name, begun + thought)
    assert (message.text, message.calls, message.reasoning) == ("", (), thought)
    assert len(parsed(name, f"{begun}So.\n</think>\n\n{call % 'x'}").calls) == 1


def test_a_thought_that_the_prompt_opened_is_none_to_say_where_the_template_shows_none():
    message = parsed("deepseekv3", "I think <answer>X</answer>")
    assert (message.text, message.reasoning) == ("", "I think <answer>X</answer>")


def test_a_thoughts_closing_mark_in_speech_closes_none():
    (call,) = parsed("qwen3", HERMES % "about </think> tag").calls
    assert call.arguments == {"query": "about </think> tag"}
    message = parsed("qwen3", "The mark is </think>.")
    assert (message.text, message.reasoning) == ("The mark is </think>.", None)
    assert split_reasoning("A </think> B") == (None, "A </think> B")


def test_the_calls_of_a_thought_have_no_ends():
    renderer = open_renderer(real_tokenizer("qwen3"))
    assert renderer.call_ends(renderer.encode("<think>\n" + HERMES % "x"), (SEARCH,)) == ()


def test_a_thought_of_gpt_oss_that_was_cut_is_a_thought():
    message = parsed("gptoss", "<|channel|>analysis<|message|>I think about it")
    assert (message.text, message.reasoning) == ("", "I think about it")


@pytest.mark.parametrize("body", ['{"query": "x"}', '{"query": '])
def test_a_thought_of_gpt_oss_may_name_a_channel(body):
    renderer, said = open_renderer(real_tokenizer("gptoss")), (Message.user("Who?"),)
    text = "<|channel|>analysis<|message|>I use <|channel|>final<|message|> later<|end|><|start|>assistant"
    ids = renderer.encode(f"{text} to=functions.search<|channel|>commentary json<|message|>{body}<|call|>")
    action = renderer.parse(ids, 0, (SEARCH,))
    assert len(action.message.calls) == 1
    grown = renderer.bridge_to_next_turn(
        renderer.render(said, (SEARCH,)), said, action, ids, (Message.tool("A page.", "call_0_0"),), (SEARCH,)
    )
    assert grown is not None


def test_speech_is_without_thoughts_and_calls_also_where_the_template_shows_no_thoughts():
    renderer = open_renderer(real_tokenizer("qwen2_5"))
    for said in ("Alba is it.", ""):
        action = renderer.parse(renderer.encode(f"<think>\nHm.\n</think>\n\n{said}\n{HERMES % 'x'}"), 0, (SEARCH,))
        assert renderer.spoken_text(action, (SEARCH,)) == said

"""Where reasoning begins and ends; nothing in it is a call or content."""

import pytest
from chat_templates import SEARCH, real_tokenizer

from agent_r1.core.messages import Message
from agent_r1.renderers.formats.detect import open_renderer
from agent_r1.renderers.formats.tool_format import split_reasoning

HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>'
QWEN35 = "<tool_call>\n<function=search>\n<parameter=query>\n%s\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"


def parse(name, text):
    renderer = open_renderer(real_tokenizer(name))
    return renderer.parse(renderer.encode(text), 0, (SEARCH,)).message


@pytest.mark.parametrize(
    ("name", "begun", "call"),
    [("qwen3", "<think>\n", HERMES), ("qwen3_5_think", "", QWEN35), ("glm4moe", "<think>", GLM)],
)
def test_cut_reasoning_has_no_calls_and_no_content(name, begun, call):
    thought = f"I might call {call % 'x'} or say <answer>X</answer>"
    message = parse(name, begun + thought)
    assert (message.text, message.calls, message.reasoning) == ("", (), thought)
    assert len(parse(name, f"{begun}So.\n</think>\n\n{call % 'x'}").calls) == 1


def test_reasoning_opened_by_the_prompt_is_not_content():
    message = parse("deepseekv3", "I think <answer>X</answer>")
    assert (message.text, message.reasoning) == ("", "I think <answer>X</answer>")


def test_a_closing_think_tag_in_content_closes_nothing():
    (call,) = parse("qwen3", HERMES % "about </think> tag").calls
    assert call.arguments == {"query": "about </think> tag"}
    message = parse("qwen3", "The mark is </think>.")
    assert (message.text, message.reasoning) == ("The mark is </think>.", None)
    assert split_reasoning("A </think> B") == (None, "A </think> B")


def test_calls_inside_reasoning_have_no_call_ends():
    renderer = open_renderer(real_tokenizer("qwen3"))
    assert renderer.call_ends(renderer.encode("<think>\n" + HERMES % "x"), (SEARCH,)) == ()


def test_cut_reasoning_of_gpt_oss_is_reasoning():
    message = parse("gptoss", "<|channel|>analysis<|message|>I think about it")
    assert (message.text, message.reasoning) == ("", "I think about it")


@pytest.mark.parametrize("body", ['{"query": "x"}', '{"query": '])
def test_reasoning_of_gpt_oss_may_hold_a_channel_token(body):
    renderer, messages = open_renderer(real_tokenizer("gptoss")), (Message.user("Who?"),)
    text = "<|channel|>analysis<|message|>I use <|channel|>final<|message|> later<|end|><|start|>assistant"
    ids = renderer.encode(f"{text} to=functions.search<|channel|>commentary json<|message|>{body}<|call|>")
    action = renderer.parse(ids, 0, (SEARCH,))
    assert len(action.message.calls) == 1
    bridge = renderer.bridge_to_next_turn(
        renderer.render(messages, (SEARCH,)), messages, action, ids, (Message.tool("A page.", "call_0_0"),), (SEARCH,)
    )
    assert bridge is not None


def test_spoken_text_excludes_reasoning_even_if_the_template_has_none():
    renderer = open_renderer(real_tokenizer("qwen2_5"))
    for spoken in ("Alba is it.", ""):
        action = renderer.parse(renderer.encode(f"<think>\nHm.\n</think>\n\n{spoken}\n{HERMES % 'x'}"), 0, (SEARCH,))
        assert renderer.spoken_text(action, (SEARCH,)) == spoken

"""Calls in tags and fences of plain text: parsing, the end of an action, and refused settings."""

import pytest
from chat_templates import SEARCH, real_tokenizer, tokenizer_of

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, ToolSpec
from agent_r1.renderers.formats.detect import open_renderer, require_tools
from agent_r1.renderers.formats.tags import Tags, TagsConfig
from agent_r1.training.config import RunConfig

PYTHON = ToolSpec(
    "python", "Run code.", {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
)
TOOLS = (SEARCH, PYTHON)


def test_tags_and_fences_are_parsed_and_text_after_a_call_is_dropped():
    renderer = open_renderer(tokenizer_of(None), "tags", TagsConfig(observation="result", names={"search": "find"}))
    text = "I look. <find>Alba </find>"
    sampled = renderer.encode(text + "\n<result>made up</result> <find>more</find>")
    ids = sampled[: renderer.action_length(sampled, TOOLS)]
    action, messages = renderer.parse(ids, 0, TOOLS), (Message.user("Who?"),)
    assert (action.text, action.message.text) == (text, "I look. ")
    assert action.message.calls[0].arguments == {"query": "Alba "}
    page = Message.tool("A </result> page.", "call_0_0")
    bridge = renderer.bridge_to_next_turn(renderer.render(messages, TOOLS), messages, action, ids, (page,), TOOLS)
    assert bridge is not None
    assert renderer.tokenizer.decode(list(bridge.token_ids)) == "\n\n<result>A < /result> page.</result>\n\n"
    fence = Tags().parse("So:\n```python\nprint(1)\n```", TOOLS)
    assert fence.calls[0].arguments == {"code": "print(1)"} and fence.content == "So:\n"


def test_tags_work_with_a_template_without_tools():
    renderer = open_renderer(real_tokenizer("gemma3"), "tags")
    require_tools(renderer, TOOLS)
    assert renderer.probe_behavior("tool", thinking=False).kind == "append"
    assert "<search>query</search> Look pages up." in renderer.render((Message.user("Who?"),), TOOLS).text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("I know. <answer>Bruno</answer>\n\nQuestion: <search>Corin</search> more", "I know. <answer>Bruno</answer>"),
        ("<answer>Bruno</answer> and so", "<answer>Bruno</answer>"),
        ("<search>Alba</search> <answer>Bruno</answer>", "<search>Alba</search>"),
        ("<answer>Bruno <search>Alba</search> on", "<answer>Bruno <search>Alba</search>"),
        ("I say <answer>Bruno", "I say <answer>Bruno"),
    ],
)
def test_an_action_ends_with_its_first_call_or_answer(text, kept):
    renderer = open_renderer(tokenizer_of(None), "tags")
    ids = renderer.encode(text)
    assert renderer.tokenizer.decode(list(ids[: renderer.action_length(ids, TOOLS)])) == kept
    calls = renderer.parse(ids, 0, TOOLS).message.calls
    assert [call.arguments for call in calls] == ([{"query": "Alba"}] if "Alba" in text else [])


def test_a_sampled_end_token_after_an_answer_is_kept():
    renderer = open_renderer(tokenizer_of(None), "tags")
    ids = (*renderer.encode("<answer>Bruno</answer>"), renderer.end_token_id)
    assert renderer.action_length(ids, TOOLS) == len(ids)


def test_the_answer_tag_is_configurable():
    text = "<result>Bruno</result> <search>Alba</search>"
    assert not Tags(TagsConfig(answer="result")).parse(text, TOOLS).calls
    assert Tags().parse(text, TOOLS).calls


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)```", "print(1)"),
        ("```py\nprint(1)\n```", "print(1)"),
        ("```python\nprint('```', 1)\n```\nSo", "print('```', 1)"),
    ],
)
def test_a_fence_ends_at_three_backticks_that_end_a_line(text, code):
    (call,) = Tags().parse(text, TOOLS).calls
    assert (call.arguments, call.error) == ({"code": code}, None)


def test_a_call_inside_leading_reasoning_is_not_a_call():
    text = "<think>I could <search>x</search></think><search>real</search>"
    assert [call.arguments for call in Tags().parse(text, TOOLS).calls] == [{"query": "real"}]
    assert not Tags().parse("<think>I could <search>x</search>", TOOLS).calls


def test_an_object_with_an_unknown_argument_is_malformed():
    (call,) = Tags().parse('<search>{"query": "a", "other": 1}</search>', TOOLS).calls
    assert call.arguments is None and call.error == "search takes no 'other': it takes query (string)"
    assert Tags().parse('<search>{"other": 1}</search>', TOOLS).calls[0].arguments == {"query": '{"other": 1}'}


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (TagsConfig(names={"serach": "find"}), "tags.names: got serach; name one of the tools: python, search"),
        (TagsConfig(names={"python": "search"}), "tags: got search for two things"),
        (TagsConfig(observation="search"), "tags: got search for two things"),
        (TagsConfig(answer="information"), "tags: got information for two things"),
    ],
)
def test_tags_that_do_not_fit_the_tools_are_refused(config, error):
    with pytest.raises(InvalidInput, match=error):
        require_tools(open_renderer(tokenizer_of(None), "tags", config), TOOLS)
    require_tools(open_renderer(tokenizer_of(None), "tags", TagsConfig(names={"search": "find"})), TOOLS)


def test_tags_settings_without_the_tags_format_are_refused():
    assert RunConfig(tool_format="tags", tags=TagsConfig(answer="result")).tags.answer == "result"
    with pytest.raises(ValueError, match="tags have an effect only with tool_format tags"):
        RunConfig(tags=TagsConfig(answer="result"))

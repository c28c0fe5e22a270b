"""Calls in tags and fences of plain text: what is read, where an action ends, and which settings are refused."""

import pytest
from chat_templates import SEARCH, real_tokenizer, tokenizer_of

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.tool import ToolSpec
from agent_r1.renderers.config import TagsConfig
from agent_r1.renderers.formats.detect import open_chat, require_tools
from agent_r1.renderers.formats.tags import Tags
from agent_r1.renderers.renderer import Appended
from agent_r1.training.config import RunConfig

PYTHON = ToolSpec(
    "python", "Run code.", {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
)
TOOLS = (SEARCH, PYTHON)


def test_tags_and_fences_are_read_and_what_comes_after_a_call_is_no_action():
    chat = open_chat(tokenizer_of(None), "tags", TagsConfig(observation="result", names={"search": "find"}))
    text = "I look. <find>Alba </find>"
    sampled = chat.encode(text + "\n<result>made up</result> <find>more</find>")
    ids = sampled[: chat.length(sampled, TOOLS)]
    action, said = chat.parse(ids, 0, TOOLS), (Message.user("Who?"),)
    assert (action.text, action.message.text) == (text, "I look. ")
    assert action.message.calls[0].arguments == {"query": "Alba "}
    page = Message.tool("A </result> page.", "call_0_0")
    grown = chat.extend(chat.open(said, TOOLS), said, action, ids, (page,), TOOLS)
    assert isinstance(grown, Appended)
    assert chat.tokenizer.decode(list(grown.ids)) == "\n\n<result>A < /result> page.</result>\n\n"
    fence = Tags().read("So:\n```python\nprint(1)\n```", TOOLS)
    assert fence.calls[0].arguments == {"code": "print(1)"} and fence.content == "So:\n"


def test_tags_work_over_a_template_that_knows_no_tools():
    chat = open_chat(real_tokenizer("gemma3"), "tags")
    require_tools(chat, TOOLS)
    assert chat.behaviour("tool", thinking=False).kind == "append"
    assert "<search>query</search> Look pages up." in chat.open((Message.user("Who?"),), TOOLS).text


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("I know. <answer>Bruno</answer>\n\nQuestion: <search>Corin</search> more", "I know. <answer>Bruno</answer>"),
        ("<answer>Bruno</answer> and so", "<answer>Bruno</answer>"),
        ("<search>Alba</search> <answer>Bruno</answer>", "<search>Alba</search>"),
        ("<answer>Bruno <search>Alba</search> on", "<answer>Bruno <search>Alba</search>"),
        ("I say <answer>Bruno", "I say <answer>Bruno"),
    ],
)
def test_an_action_ends_with_its_first_call_or_answer(said, kept):
    chat = open_chat(tokenizer_of(None), "tags")
    ids = chat.encode(said)
    assert chat.tokenizer.decode(list(ids[: chat.length(ids, TOOLS)])) == kept
    calls = chat.parse(ids, 0, TOOLS).message.calls
    assert [call.arguments for call in calls] == ([{"query": "Alba"}] if "Alba" in said else [])


def test_an_end_token_right_after_an_answer_stays_the_policys_own():
    chat = open_chat(tokenizer_of(None), "tags")
    ids = (*chat.encode("<answer>Bruno</answer>"), chat.end_id)
    assert chat.length(ids, TOOLS) == len(ids)


def test_the_tag_of_an_answer_can_be_another():
    said = "<result>Bruno</result> <search>Alba</search>"
    assert not Tags(TagsConfig(answer="result")).read(said, TOOLS).calls
    assert Tags().read(said, TOOLS).calls


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("```python\nprint(1)```", "print(1)"),
        ("```py\nprint(1)\n```", "print(1)"),
        ("```python\nprint('```', 1)\n```\nSo", "print('```', 1)"),
    ],
)
def test_a_fence_ends_where_three_backticks_end_a_line(said, code):
    (call,) = Tags().read(said, TOOLS).calls
    assert (call.arguments, call.error) == ({"code": code}, None)


def test_a_call_inside_a_leading_thought_is_none():
    said = "<think>I could <search>x</search></think><search>real</search>"
    assert [call.arguments for call in Tags().read(said, TOOLS).calls] == [{"query": "real"}]
    assert not Tags().read("<think>I could <search>x</search>", TOOLS).calls


def test_an_object_with_an_argument_that_there_is_not_is_told_so():
    (call,) = Tags().read('<search>{"query": "a", "other": 1}</search>', TOOLS).calls
    assert call.arguments is None and call.error == "search takes no 'other'"
    assert Tags().read('<search>{"other": 1}</search>', TOOLS).calls[0].arguments == {"query": '{"other": 1}'}


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
        require_tools(open_chat(tokenizer_of(None), "tags", config), TOOLS)
    require_tools(open_chat(tokenizer_of(None), "tags", TagsConfig(names={"search": "find"})), TOOLS)


def test_tags_that_another_format_does_not_use_are_refused():
    assert RunConfig(tool_format="tags", tags=TagsConfig(answer="result")).tags.answer == "result"
    with pytest.raises(ValueError, match="tags do nothing but with tool_format tags"):
        RunConfig(tags=TagsConfig(answer="result"))

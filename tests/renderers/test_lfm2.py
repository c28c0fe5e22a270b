"""The calls of LFM2 and LFM2.5: Python calls in a list between special tokens."""

import pytest
from chat_templates import SEARCH, tokenizer_of
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.messages import Message, ToolCall
from agent_r1.renderers.formats.delimited_formats import CALL_END as CLOSE, CALL_START as OPEN, Lfm2
from agent_r1.renderers.formats.detect import open_renderer, require_tools

CONTENT_ONLY = """\
{%- for tool in tools or [] %}<|im_start|>system
{{ tool | tojson }}<|im_end|>
{% endfor -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that, as LFM2's own does, writes no calls."""

PARSER = Lfm2()


def calls_of(inside):
    calls = PARSER.parse(f"I look.{OPEN}{inside}{CLOSE}", (SEARCH,)).calls
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("inside", "calls"),
    [
        ("[search(query='Alba')]", [("search", {"query": "Alba"})]),
        ('[search(query="a, (b) = [c]")]', [("search", {"query": "a, (b) = [c]"})]),
        ("[a(x=1, y=-2.5), b()]", [("a", {"x": 1, "y": -2.5}), ("b", {})]),
        ("[a(x=[1, {'k': None}], y=True)]", [("a", {"x": [1, {"k": None}], "y": True})]),
        ('[my-server.find(x={"k": true, "l": null})]', [("my-server.find", {"x": {"k": True, "l": None}})]),
        (r"[a(x='it\'s', y='C:\dir')]", [("a", {"x": "it's", "y": r"C:\dir"})]),
        (" [ a ( x = 'é' ) ] ", [("a", {"x": "é"})]),
    ],
)
def test_calls_are_read(inside, calls):
    assert calls_of(inside) == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"{OPEN}[search(query='a')", "not closed"),
        (f"{OPEN}search(query='a'){CLOSE}", "written as a list"),
        (f"{OPEN}[search('a')]{CLOSE}", "name=value"),
        (f"{OPEN}[search(query='a', query='b')]{CLOSE}", "given twice"),
        (f"{OPEN}[search(query=open('x'))]{CLOSE}", "cannot be read"),
        (f"{OPEN}[search(query=1e999)]{CLOSE}", "cannot be read"),
        (f"{OPEN}[search(query={'[' * 100_000})]{CLOSE}", "written as|cannot be read|name=value"),
        (f"{OPEN}[search]{CLOSE}", "written as name"),
        (f"{OPEN}[]{CLOSE}", "written as name"),
        (f"{OPEN}[search(query='\\x3c|tool_call_end|>')]{CLOSE}", "which ends it"),
    ],
)
def test_a_malformed_call_has_an_error(text, error):
    (call,) = PARSER.parse(text, (SEARCH,)).calls
    assert call.arguments is None and any(part in call.error for part in error.split("|"))
    assert call.end == len(text)


def test_each_call_ends_with_its_parenthesis():
    text = f"So.{OPEN}[a(x='ü'), b(y=2)]{CLOSE} Then."
    ends = [text[: call.end] for call in PARSER.parse(text, ()).calls]
    assert ends == [f"So.{OPEN}[a(x='ü')", f"So.{OPEN}[a(x='ü'), b(y=2)]{CLOSE}"]


def test_a_template_without_calls_is_used_if_the_tokenizer_has_the_tokens():
    renderer = open_renderer(tokenizer_of(CONTENT_ONLY, [OPEN, CLOSE]))
    require_tools(renderer, (SEARCH,))
    assert renderer.tool_format.name == "lfm2"
    assert renderer.probe_behavior("tool", thinking=False).kind == "append"
    assert open_renderer(tokenizer_of(CONTENT_ONLY)).tool_format.name != "lfm2"
    assert open_renderer(hermes_tokenizer()).tool_format.name == "hermes"


def test_written_calls_are_read_back():
    renderer = open_renderer(tokenizer_of(CONTENT_ONLY, [OPEN, CLOSE]))
    arguments = {"query": 'it\'s "x"\n, (y)', "n": [1, None, {"a": True}]}
    call = Message.assistant("I look.", (ToolCall("call_0_0", "search", arguments, ""),))
    text = renderer.render_text((Message.user("Who?"), call), (SEARCH,))
    assert calls_of(text[text.index(OPEN) + len(OPEN) : text.index(CLOSE)]) == [("search", arguments)]

"""Tool-call formats: what the real templates write is read back, and what cannot be read has a reason."""

import pytest
from chat_templates import real_tokenizer, tokenizer_of
from hypothesis import given, settings, strategies as st
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.arguments import parse_json
from agent_r1.core.errors import InvalidInput, UnsupportedChat
from agent_r1.core.messages import Message, ToolCall, ToolSpec
from agent_r1.renderers.formats.delimited_formats import Glm, Qwen35
from agent_r1.renderers.formats.detect import FORMAT_NAMES, TEMPLATE_FORMATS, open_renderer, require_tools
from agent_r1.renderers.formats.json_formats import (
    BEGIN,
    CALL_CLOSE,
    CALL_OPEN,
    END,
    SEPARATOR,
    DeepSeek,
    Harmony,
    Hermes,
    Llama,
)
from agent_r1.renderers.formats.tags import Tags
from agent_r1.renderers.formats.tool_format import ParsedOutput, call_from_json
from agent_r1.renderers.template_renderer import TemplateRenderer

ARGUMENTS = {
    **{"query": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "boolean"}},
    **{"options": {"type": "object"}, "names": {"type": "array", "items": {"type": "string"}}},
}
LOOK = ToolSpec("look", "Look pages up.", {"type": "object", "properties": ARGUMENTS, "required": ["query"]})


def text_tool(name, description, argument):
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return ToolSpec(name, description, schema)


SEARCH, PYTHON = text_tool("search", "Search.", "query"), text_tool("python", "Run code.", "code")
TOOLS = (LOOK, SEARCH, PYTHON)


@pytest.fixture(scope="module")
def renderers():
    made = {}

    def of(name):
        if name not in made:
            made[name] = (
                open_renderer(tokenizer_of(None), "tags") if name == "plain" else open_renderer(real_tokenizer(name))
            )
        return made[name]

    return of


WITH_TOOLS = ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "gptoss", "deepseekv3", "plain"]
MARKS = ("<", ">", "`", "\r")
"""What formats of bare text cannot hold in a value; tokenizers of bytes hold everything else."""
BARE = ["qwen3_5_think", "glm4moe", "plain"]

ODD = ['a "b" \\"c\\"', "it's", "{x}", "日本 é 😀", "7", "true", "null", "two\nlines", "{", "", '{"query": "a"}']
ODD += ['{"query": "a", "more": 1}']
MARKED = ["</tool_call>", "a <tool_call>\n{}", "</think> b", "```", "<|channel|>", "</tool_call>\n<tool_call>"]


def words_without(marks):
    return st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"), exclude_characters=marks), max_size=12)


def arguments_of(words, odd):
    quoted = words | st.sampled_from(odd)
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-(10**9), 10**9) | quoted,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
        max_leaves=5,
    )
    return st.fixed_dictionaries(
        {"query": quoted},
        optional={
            "count": st.integers(),
            "deep": st.booleans(),
            "options": st.dictionaries(words, values, max_size=3),
            "names": st.lists(quoted, max_size=3),
        },
    )


words = words_without(MARKS)
arguments = arguments_of(words, ODD)
any_arguments = arguments_of(words_without(("\r",)), ODD + MARKED)


def written(renderer, messages, message, tools):
    """Return the prompt, the tokens of the action as the template writes it, and its end token."""
    prompt = renderer.render(messages, tools)
    alone = renderer.render_text((*messages, message), tools)
    opening = prompt.text if alone.startswith(prompt.text) else prompt.text.removesuffix("<think>\n")
    text = alone.removeprefix(opening).rstrip("\n")
    assert len(text) < len(alone)
    if opening != prompt.text:
        text = "</think>\n\n" + text  # the template drops the reasoning that the prompt opened
    end = next((end for end in renderer.stop_token_ids if text.endswith(renderer.tokenizer.decode([end]))), None)
    return prompt, renderer.encode(text), end


@pytest.mark.parametrize("name", WITH_TOOLS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_call_that_the_template_writes_is_read_back(renderers, name, data):
    renderer, given = renderers(name), data.draw(arguments if name in BARE else any_arguments)
    message = Message.assistant("", (ToolCall("call_0_0", "look", given, ""),))
    _, ids, _ = written(renderer, (Message.user("Who?"),), message, TOOLS)
    (call,) = renderer.parse(ids, 0, TOOLS).message.calls
    assert (call.name, call.arguments, call.error) == ("look", given, None)
    assert type(call.arguments["query"]) is str


def test_argument_types_come_from_the_tools_schema(renderers):
    renderer = renderers("glm4moe")
    message = Message.assistant("", (ToolCall("call_0_0", "look", {"query": "7"}, ""),))
    _, ids, _ = written(renderer, (Message.user("Who?"),), message, TOOLS)
    assert renderer.parse(ids, 0, TOOLS).message.calls[0].arguments == {"query": "7"}
    assert renderer.parse(ids, 0, ()).message.calls[0].arguments == {"query": 7}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_5_think", "glm4moe", "deepseekv3"])
@settings(max_examples=10)
@given(data=st.data())
def test_several_calls_are_read_back_in_order(renderers, name, data):
    one = arguments if name in BARE else any_arguments
    renderer, given = renderers(name), data.draw(st.lists(one, min_size=2, max_size=3))
    calls = tuple(ToolCall(f"call_0_{place}", "look", one, "") for place, one in enumerate(given))
    _, ids, _ = written(renderer, (Message.user("Who?"),), Message.assistant("", calls), TOOLS)
    assert [call.arguments for call in renderer.parse(ids, 0, TOOLS).message.calls] == given
    assert len(renderer.call_ends(ids, TOOLS)) == len(given)


def test_several_calls_of_llama_are_rendered_as_text(renderers):
    renderer, messages = renderers("llama3_1"), (Message.user("Who?"),)
    text = '{"name": "search", "parameters": {"query": "a;b"}}; {"name": "search", "parameters": {"query": "c"}}'
    ids = (*renderer.encode(text), renderer.end_token_id)
    action = renderer.parse(ids, 0, TOOLS)
    assert [call.arguments["query"] for call in action.message.calls] == ["a;b", "c"]
    observation = (Message.tool("A page.", "call_0_0"), Message.tool("Another.", "call_0_1"))
    assert (
        renderer.bridge_to_next_turn(renderer.render(messages, TOOLS), messages, action, ids, observation, TOOLS)
        is not None
    )


APPENDING = ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "gptoss", "plain"]


def converse(renderer, queries, grow=TemplateRenderer.bridge_to_next_turn):
    """Yield (context tokens, rendered prompt) after each turn; the calls are worded as the template does."""
    messages = (Message.system("Be brief."), Message.user("Who rules Alba?"))
    prompt = renderer.render(messages, TOOLS)
    state = prompt.token_ids
    for turn, query in enumerate(queries):
        message = Message.assistant("", (ToolCall(f"call_{turn}_0", "search", {"query": query}, ""),))
        text = renderer.render_text(
            (*messages, message, Message.tool("?", f"call_{turn}_0")), TOOLS, add_generation_prompt=True
        )
        wording = text.removeprefix(prompt.text)
        sampled = renderer.encode(wording)
        stop = next((place for place, token in enumerate(sampled) if token in renderer.stop_token_ids), None)
        ids = sampled[: renderer.action_length(sampled, TOOLS)] if stop is None else sampled[: stop + 1]
        action = renderer.parse(ids, turn, TOOLS)
        observation = (Message.tool(f"Page {turn}: ünïcödé </s> \n日", f"call_{turn}_0"),)
        prompt = grow(renderer, prompt, messages, action, ids, observation, TOOLS)
        assert prompt is not None
        state, messages = state + ids + prompt.token_ids, (*messages, action.message, *observation)
        yield state, prompt


@pytest.mark.parametrize("name", APPENDING)
@settings(max_examples=5)
@given(queries=st.lists(words, min_size=2, max_size=3))
def test_bridged_tokens_decode_to_the_full_render(renderers, name, queries):
    renderer = renderers(name)
    for state, prompt in converse(renderer, [query or "x" for query in queries]):
        assert renderer.tokenizer.decode(list(state)) == prompt.text


@pytest.mark.parametrize("name", APPENDING)
def test_a_bridge_that_lacks_a_byte_is_detected(renderers, name):
    def without_first_token(*arguments):
        prompt = TemplateRenderer.bridge_to_next_turn(*arguments)
        return type(prompt)(prompt.text, prompt.token_ids[1:])

    state, prompt = list(converse(renderers(name), ["Alba"], without_first_token))[-1]
    assert renderers(name).tokenizer.decode(list(state)) != prompt.text


def test_a_template_that_changes_earlier_text_has_no_bridge(renderers):
    renderer, messages = renderers("deepseekv3"), (Message.user("Who?"),)
    message = Message.assistant("", (ToolCall("call_0_0", "look", {"query": "a"}, ""),))
    prompt, ids, end = written(renderer, messages, message, TOOLS)
    observation = (Message.tool("A page.", "call_0_0"),)
    action = renderer.parse(ids, 0, TOOLS)
    assert renderer.bridge_to_next_turn(prompt, messages, action, (*ids, end), observation, TOOLS) is None
    assert "A page." in renderer.render((*messages, action.message, *observation), TOOLS).text


def test_an_action_that_ends_with_the_wrong_token_has_no_bridge(renderers):
    renderer, messages = renderers("glm4moe"), (Message.user("Who?"),)
    message = Message.assistant("", (ToolCall("call_0_0", "look", {"query": "a"}, ""),))
    prompt, ids, _ = written(renderer, messages, message, TOOLS)
    answered, called, _ = renderer.stop_token_ids
    observation = (Message.tool("A page.", "call_0_0"),)
    right, wrong = (
        renderer.bridge_to_next_turn(
            prompt, messages, renderer.parse((*ids, end), 0, TOOLS), (*ids, end), observation, TOOLS
        )
        for end in (called, answered)
    )
    assert right is not None and wrong is None


def test_reasoning_and_answer_of_gpt_oss_are_separated(renderers):
    renderer = renderers("gptoss")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Bruno."
    message = renderer.parse((*renderer.encode(text), renderer.end_token_id)).message
    assert (message.reasoning, message.text, message.calls) == ("Hm.", "Bruno.", ())


def test_a_malformed_call_of_gpt_oss_gets_a_tool_result(renderers):
    renderer, messages = renderers("gptoss"), (Message.user("Who?"),)
    text = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"query": '
    ids = (*renderer.encode(text), renderer.stop_token_ids[1])
    action = renderer.parse(ids, 0, TOOLS)
    bridge = renderer.bridge_to_next_turn(
        renderer.render(messages, TOOLS), messages, action, ids, (Message.tool("No.", "call_0_0"),), TOOLS
    )
    assert action.message.calls[0].name == "look" and "not valid JSON" in action.message.calls[0].error
    assert bridge is not None and "No." in renderer.tokenizer.decode(list(bridge.token_ids))


BROKEN = [
    (Qwen35(), "<tool_call>\n<function=look>", "not closed by </tool_call>"),
    (Qwen35(), "<tool_call>\n{}\n</tool_call>", "<function=NAME>"),
    (Qwen35(), "<tool_call><function=look><parameter=query>a</function></tool_call>", "no argument: '<parameter=query"),
    (
        Qwen35(),
        "<tool_call><function=look>" + "<parameter=a>a</parameter>" * 2 + "</function></tool_call>",
        "twice",
    ),
    (Glm(), "<tool_call>look\n<arg_key>query</arg_key>", "not closed"),
    (Glm(), "<tool_call>\n<arg_key>q</arg_key><arg_value>a</arg_value></tool_call>", "begins with the name"),
    (Glm(), "<tool_call>look\n<arg_key>query</arg_key>\n</tool_call>", "no argument"),
    (Llama(), '{"name": "look", "parameters": {"query": ', "not valid JSON"),
    (Llama(), '{"name": "look", "query": "a"}', 'no key \'query\': its keys are "name" and "arguments"'),
    (Llama(), '{"name": "look", "parameters": {"count": NaN}}', "NaN is not JSON"),
    (Llama(), '{"name": "look", "parameters": {}}; {"name": ', "not valid JSON"),
    (Llama(), "<|python_tag|>search(1)", "not valid JSON"),
    (Llama(), '{"name": ' + "[" * 50_000, "not valid JSON"),
    (DeepSeek(), f"{BEGIN}{CALL_OPEN}function", "not closed"),
    (DeepSeek(), f"{BEGIN}{CALL_OPEN}look{CALL_CLOSE}{END}", "has no"),
    (DeepSeek(), f"{BEGIN}{CALL_OPEN}function{SEPARATOR}look\n{{}}{CALL_CLOSE}{END}", "fence"),
    (DeepSeek(), f"{BEGIN}{CALL_OPEN}function{SEPARATOR}look\n```json\n[\n```{CALL_CLOSE}{END}", "not valid JSON"),
    (Harmony(), "<|channel|>commentary to=functions.look<|message|>query", "not valid JSON"),
    (Harmony(), "<|channel|>commentary to=functions.look<|message|>[1]", '"arguments" are a JSON object, got array'),
    (Tags(), "<search>Alba", "not closed by </search>"),
    (Tags(), "<search> </search>", "nothing is given for query"),
    (Tags(), "```python\nprint(1)", "not closed by ```"),
]


@pytest.mark.parametrize(("format", "text", "error"), BROKEN)
def test_a_malformed_call_has_a_readable_reason(format, text, error):
    call = format.parse(text, TOOLS).calls[-1]
    assert call.arguments is None and error in call.error
    assert call.end == len(text.removesuffix(END))


@given(st.text('<>{}"|=/ \nabflook_callsrchptunig' + "\uff5c\u2581", max_size=60), st.sampled_from(TEMPLATE_FORMATS))
def test_parsing_never_raises(text, known):
    for call in known().parse(text, TOOLS).calls:
        assert (call.arguments is None) == (call.error is not None) and 0 < call.end <= len(text)


def test_a_json_answer_is_not_a_call():
    assert Llama().parse('{"answer": 3}', TOOLS).content == '{"answer": 3}'


def test_both_deepseek_call_styles_are_parsed():
    bare = f'{BEGIN}{CALL_OPEN}look{SEPARATOR}{{"query": "a"}}{CALL_CLOSE}{END}'
    fenced = f'So. {BEGIN}{CALL_OPEN}function{SEPARATOR}look\n```json\n{{"query": "a"}}\n```{CALL_CLOSE}{END}'
    assert [DeepSeek().parse(text, TOOLS).calls[0].arguments for text in (bare, fenced)] == [{"query": "a"}] * 2
    assert DeepSeek().parse(fenced, TOOLS).content == "So. "


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": "<|im_end|>", "repeats": True, "join": ""},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


@pytest.fixture(scope="module")
def response_renderer():
    tokenizer = hermes_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    return open_renderer(tokenizer)


@settings(max_examples=25)
@given(given=st.lists(arguments, min_size=1, max_size=3))
def test_a_response_template_parses_calls(response_renderer, given):
    calls = tuple(ToolCall(f"call_0_{place}", "look", one, "") for place, one in enumerate(given))
    _, ids, _ = written(response_renderer, (Message.user("Who?"),), Message.assistant("I look.", calls), TOOLS)
    message = response_renderer.parse(ids, 0, TOOLS).message
    assert response_renderer.tool_format.name == "response" and message.text.strip() == "I look."
    assert [call.arguments for call in message.calls] == given
    hermes = TemplateRenderer(response_renderer.tokenizer)
    assert response_renderer.call_ends(ids, TOOLS) == hermes.call_ends(ids, TOOLS)


def test_text_that_a_response_template_cannot_parse_has_a_reason(response_renderer):
    for text in ('<tool_call>{"name": ', "<tool_call>[1]</tool_call>", "<tool_call>nonsense</tool_call>"):
        message = response_renderer.parse(response_renderer.encode(text), 0, TOOLS).message
        assert message.calls[0].error and message.text == text


def test_an_unknown_format_error_lists_the_formats():
    with pytest.raises(InvalidInput, match=f"choose from {', '.join(FORMAT_NAMES)}"):
        open_renderer(hermes_tokenizer(), "herms")
    with pytest.raises(InvalidInput, match="without a response_template"):
        open_renderer(hermes_tokenizer(), "response")


def test_if_no_format_fits_the_error_is_one_line(renderers):
    error = r"does not show tools to the model; give --tool_format tags, .*or another --tool_format \(auto"
    with pytest.raises(UnsupportedChat, match=error):
        require_tools(renderers("gemma3"), TOOLS)
    with pytest.raises(UnsupportedChat, match="or give --tool_format tags"):
        open_renderer(tokenizer_of(None))


def test_a_call_without_a_name_is_malformed():
    assert call_from_json({"name": "", "arguments": {}}, "", 0).error == 'the call has no "name"'


TEXTS = ["{1, 2}", '{"name": "Ann", "age": 3}', '{"a": 1} and so', '{"answer": 3}', '{"parameters": {}}']


@pytest.mark.parametrize("text", TEXTS)
def test_a_llama_answer_that_begins_with_a_brace_is_not_a_call(text):
    assert Llama().parse(text, TOOLS) == ParsedOutput(text)


def test_without_tools_llama_output_has_no_calls():
    text = '{"name": "search", "parameters": {"query": "a"}}'
    assert Llama().parse(text, TOOLS).calls and Llama().parse(text, ()) == ParsedOutput(text)


def test_text_after_a_llama_call_is_not_another_call():
    text = '{"name": "search", "parameters": {"query": "a"}}'
    (call,) = Llama().parse(f"{text}\nI wait {{.", TOOLS).calls
    assert (call.raw, call.end, call.error) == (text, len(text), None)


@pytest.mark.parametrize("levels", [101, 500, 900, 3000])
def test_deeply_nested_json_is_refused(levels):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * levels + "]" * levels)
    assert parse_json("[" * 100 + "]" * 100) and parse_json('"' + "[" * levels + '"') == "[" * levels


def test_a_number_beyond_float_range_is_refused():
    with pytest.raises(ValueError, match="1e999 is too large a number"):
        parse_json('{"a": 1e999}')


@pytest.mark.parametrize(
    ("written", "read"),
    [('"arguments": "{\\"query\\": \\"a\\"}"', {"query": "a"}), ('"id": 1', {}), ('"arguments": "a"', None)],
)
def test_hermes_accepts_string_arguments_and_calls_without_arguments(written, read):
    (call,) = Hermes().parse(f'<tool_call>{{"name": "look", {written}}}</tool_call>', TOOLS).calls
    assert call.arguments == read and (call.error is None) == (read is not None)


def test_a_malformed_call_does_not_swallow_the_next_one():
    good = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    calls = Hermes().parse(f'<tool_call>{{"name": "look</tool_call> {good}', TOOLS).calls
    assert [call.error is None for call in calls] == [False, True]


def test_a_bare_text_argument_ends_at_its_closing_delimiter():
    text = "<tool_call><function=look><parameter=query>a</parameter> b</parameter></function></tool_call>"
    assert "no argument" in Qwen35().parse(text, TOOLS).calls[0].error
    text = text.replace(" b</parameter>", "<parameter=count>5</parameter>")
    assert Qwen35().parse(text, TOOLS).calls[0].arguments == {"query": "a", "count": 5}

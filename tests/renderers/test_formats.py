"""Tool-call formats: what the real templates write is read back, and what cannot be read has a reason."""

import pytest
from chat_templates import real_tokenizer, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.errors import InvalidInput, UnsupportedChat
from agent_r1.core.messages import Message, ToolCall
from agent_r1.core.tool import ToolSpec
from agent_r1.renderers.formats.deepseek import BEGIN, CLOSE, END, OPEN, SEPARATOR, DeepSeek
from agent_r1.renderers.formats.detect import FORMAT_NAMES, TEMPLATE_FORMATS, open_renderer, require_tools
from agent_r1.renderers.formats.harmony import Harmony
from agent_r1.renderers.formats.hermes import Hermes
from agent_r1.renderers.formats.llama import Llama
from agent_r1.renderers.formats.tags import Tags
from agent_r1.renderers.formats.tool_format import ParsedOutput, call_from_json, parse_json
from agent_r1.renderers.formats.xml import Glm, Qwen35
from agent_r1.renderers.template_renderer import TemplateRenderer

LOOK = ToolSpec(
    "look",
    "Look pages up.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "count": {"type": "integer"},
            "deep": {"type": "boolean"},
            "options": {"type": "object"},
            "names": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["query"],
    },
)
SEARCH = ToolSpec(
    "search", "Search.", {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
)
PYTHON = ToolSpec(
    "python", "Run code.", {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
)
TOOLS = (LOOK, SEARCH, PYTHON)


@pytest.fixture(scope="module")
def chats():
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


def written(renderer, said, message, tools):
    """The action as the template words it, as tokens."""
    view = renderer.render(said, tools)
    alone = renderer.render_text((*said, message), tools)
    opening = view.text if alone.startswith(view.text) else view.text.removesuffix("<think>\n")
    text = alone.removeprefix(opening).rstrip("\n")
    assert len(text) < len(alone)
    if opening != view.text:
        text = "</think>\n\n" + text  # a past without the thought that the prompt opens
    end = next((end for end in renderer.stop_token_ids if text.endswith(renderer.tokenizer.decode([end]))), None)
    return view, renderer.encode(text), end


@pytest.mark.parametrize("name", WITH_TOOLS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_call_that_the_template_writes_is_read_back(chats, name, data):
    renderer, given = chats(name), data.draw(arguments if name in BARE else any_arguments)
    message = Message.assistant("", (ToolCall("call_0_0", "look", given, ""),))
    _, ids, _ = written(renderer, (Message.user("Who?"),), message, TOOLS)
    (call,) = renderer.parse(ids, 0, TOOLS).message.calls
    assert (call.name, call.arguments, call.error) == ("look", given, None)
    assert type(call.arguments["query"]) is str


def test_reading_values_without_the_tools_schema_would_be_seen(chats):
    renderer = chats("glm4moe")
    message = Message.assistant("", (ToolCall("call_0_0", "look", {"query": "7"}, ""),))
    _, ids, _ = written(renderer, (Message.user("Who?"),), message, TOOLS)
    assert renderer.parse(ids, 0, TOOLS).message.calls[0].arguments == {"query": "7"}
    assert renderer.parse(ids, 0, ()).message.calls[0].arguments == {"query": 7}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_5_think", "glm4moe", "deepseekv3"])
@settings(max_examples=10)
@given(data=st.data())
def test_several_calls_in_a_turn_are_read_back_in_their_order(chats, name, data):
    one = arguments if name in BARE else any_arguments
    renderer, given = chats(name), data.draw(st.lists(one, min_size=2, max_size=3))
    calls = tuple(ToolCall(f"call_0_{place}", "look", one, "") for place, one in enumerate(given))
    _, ids, _ = written(renderer, (Message.user("Who?"),), Message.assistant("", calls), TOOLS)
    assert [call.arguments for call in renderer.parse(ids, 0, TOOLS).message.calls] == given
    assert len(renderer.call_ends(ids, TOOLS)) == len(given)


def test_several_calls_of_llama_stay_text_because_its_template_takes_one(chats):
    renderer, said = chats("llama3_1"), (Message.user("Who?"),)
    text = '{"name": "search", "parameters": {"query": "a;b"}}; {"name": "search", "parameters": {"query": "c"}}'
    ids = (*renderer.encode(text), renderer.end_token_id)
    action = renderer.parse(ids, 0, TOOLS)
    assert [call.arguments["query"] for call in action.message.calls] == ["a;b", "c"]
    observed = (Message.tool("A page.", "call_0_0"), Message.tool("Another.", "call_0_1"))
    assert renderer.bridge_to_next_turn(renderer.render(said, TOOLS), said, action, ids, observed, TOOLS) is not None


APPENDING = ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "gptoss", "plain"]


def converse(renderer, queries, grow=TemplateRenderer.bridge_to_next_turn):
    """Turn by turn: (the state by tokens, what the template renders); calls in the template's own words."""
    said = (Message.system("Be brief."), Message.user("Who rules Alba?"))
    view = renderer.render(said, TOOLS)
    state = view.token_ids
    for turn, query in enumerate(queries):
        message = Message.assistant("", (ToolCall(f"call_{turn}_0", "search", {"query": query}, ""),))
        text = renderer.render_text(
            (*said, message, Message.tool("?", f"call_{turn}_0")), TOOLS, add_generation_prompt=True
        )
        wording = text.removeprefix(view.text)
        sampled = renderer.encode(wording)
        stop = next((place for place, token in enumerate(sampled) if token in renderer.stop_token_ids), None)
        ids = sampled[: renderer.action_length(sampled, TOOLS)] if stop is None else sampled[: stop + 1]
        action = renderer.parse(ids, turn, TOOLS)
        observed = (Message.tool(f"Page {turn}: ünïcödé </s> \n日", f"call_{turn}_0"),)
        view = grow(renderer, view, said, action, ids, observed, TOOLS)
        assert view is not None
        state, said = state + ids + view.token_ids, (*said, action.message, *observed)
        yield state, view


@pytest.mark.parametrize("name", APPENDING)
@settings(max_examples=5)
@given(queries=st.lists(words, min_size=2, max_size=3))
def test_a_state_grown_by_tokens_has_the_bytes_of_the_templates_own_render(chats, name, queries):
    renderer = chats(name)
    for state, view in converse(renderer, [query or "x" for query in queries]):
        assert renderer.tokenizer.decode(list(state)) == view.text


@pytest.mark.parametrize("name", APPENDING)
def test_a_bridge_that_lacks_a_byte_would_be_seen(chats, name):
    def forgetful(*arguments):
        view = TemplateRenderer.bridge_to_next_turn(*arguments)
        return type(view)(view.text, view.token_ids[1:])

    state, view = list(converse(chats(name), ["Alba"], forgetful))[-1]
    assert chats(name).tokenizer.decode(list(state)) != view.text


def test_a_template_that_words_the_past_anew_starts_a_branch(chats):
    renderer, said = chats("deepseekv3"), (Message.user("Who?"),)
    message = Message.assistant("", (ToolCall("call_0_0", "look", {"query": "a"}, ""),))
    view, ids, end = written(renderer, said, message, TOOLS)
    observed = (Message.tool("A page.", "call_0_0"),)
    action = renderer.parse(ids, 0, TOOLS)
    assert renderer.bridge_to_next_turn(view, said, action, (*ids, end), observed, TOOLS) is None
    assert "A page." in renderer.render((*said, action.message, *observed), TOOLS).text


def test_an_action_that_ends_with_the_wrong_token_starts_a_branch(chats):
    renderer, said = chats("glm4moe"), (Message.user("Who?"),)
    message = Message.assistant("", (ToolCall("call_0_0", "look", {"query": "a"}, ""),))
    view, ids, _ = written(renderer, said, message, TOOLS)
    answered, called, _ = renderer.stop_token_ids
    observed = (Message.tool("A page.", "call_0_0"),)
    right, wrong = (
        renderer.bridge_to_next_turn(view, said, renderer.parse((*ids, end), 0, TOOLS), (*ids, end), observed, TOOLS)
        for end in (called, answered)
    )
    assert right is not None and wrong is None


def test_a_thought_and_an_answer_of_gpt_oss_are_told_apart(chats):
    renderer = chats("gptoss")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Bruno."
    message = renderer.parse((*renderer.encode(text), renderer.end_token_id)).message
    assert (message.reasoning, message.text, message.calls) == ("Hm.", "Bruno.", ())


def test_a_malformed_call_of_gpt_oss_is_answered_all_the_same(chats):
    renderer, said = chats("gptoss"), (Message.user("Who?"),)
    text = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"query": '
    ids = (*renderer.encode(text), renderer.stop_token_ids[1])
    action = renderer.parse(ids, 0, TOOLS)
    grown = renderer.bridge_to_next_turn(
        renderer.render(said, TOOLS), said, action, ids, (Message.tool("No.", "call_0_0"),), TOOLS
    )
    assert action.message.calls[0].name == "look" and "not valid JSON" in action.message.calls[0].error
    assert grown is not None and "No." in renderer.tokenizer.decode(list(grown.token_ids))


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
    (Llama(), '{"name": "look"}', '"parameters" object'),
    (Llama(), '{"name": "look", "parameters": {"count": NaN}}', "NaN is not JSON"),
    (Llama(), '{"name": "look", "parameters": {}}; {"name": ', "not valid JSON"),
    (Llama(), "<|python_tag|>search(1)", "not valid JSON"),
    (Llama(), '{"name": ' + "[" * 50_000, "not valid JSON"),
    (DeepSeek(), f"{BEGIN}{OPEN}function", "not closed"),
    (DeepSeek(), f"{BEGIN}{OPEN}look{CLOSE}{END}", "has no"),
    (DeepSeek(), f"{BEGIN}{OPEN}function{SEPARATOR}look\n{{}}{CLOSE}{END}", "fence"),
    (DeepSeek(), f"{BEGIN}{OPEN}function{SEPARATOR}look\n```json\n[\n```{CLOSE}{END}", "not valid JSON"),
    (Harmony(), "<|channel|>commentary to=functions.look<|message|>query", "not valid JSON"),
    (Harmony(), "<|channel|>commentary to=functions.look<|message|>[1]", '"arguments" object'),
    (Tags(), "<search>Alba", "not closed by </search>"),
    (Tags(), "<search> </search>", "nothing is given for query"),
    (Tags(), "```python\nprint(1)", "not closed by ```"),
]


@pytest.mark.parametrize(("format", "text", "error"), BROKEN)
def test_a_malformed_call_has_a_reason_that_the_policy_can_read(format, text, error):
    call = format.parse(text, TOOLS).calls[-1]
    assert call.arguments is None and error in call.error
    assert call.end == len(text.removesuffix(END))


@given(st.text('<>{}"|=/ \nabflook_callsrchptunig' + "\uff5c\u2581", max_size=60), st.sampled_from(TEMPLATE_FORMATS))
def test_reading_never_raises(text, known):
    for call in known().parse(text, TOOLS).calls:
        assert (call.arguments is None) == (call.error is not None) and 0 < call.end <= len(text)


def test_an_answer_in_json_is_no_call():
    assert Llama().parse('{"answer": 3}', TOOLS).content == '{"answer": 3}'


def test_both_ways_of_deepseek_are_read():
    bare = f'{BEGIN}{OPEN}look{SEPARATOR}{{"query": "a"}}{CLOSE}{END}'
    fenced = f'So. {BEGIN}{OPEN}function{SEPARATOR}look\n```json\n{{"query": "a"}}\n```{CLOSE}{END}'
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
def response_chat():
    tokenizer = hermes_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    return open_renderer(tokenizer)


@settings(max_examples=25)
@given(given=st.lists(arguments, min_size=1, max_size=3))
def test_a_tokenizers_own_response_template_reads_calls(response_chat, given):
    calls = tuple(ToolCall(f"call_0_{place}", "look", one, "") for place, one in enumerate(given))
    _, ids, _ = written(response_chat, (Message.user("Who?"),), Message.assistant("I look.", calls), TOOLS)
    message = response_chat.parse(ids, 0, TOOLS).message
    assert response_chat.tool_format.name == "response" and message.text.strip() == "I look."
    assert [call.arguments for call in message.calls] == given
    hermes = TemplateRenderer(response_chat.tokenizer)
    assert response_chat.call_ends(ids, TOOLS) == hermes.call_ends(ids, TOOLS)


def test_what_a_response_template_cannot_read_has_a_reason(response_chat):
    for text in ('<tool_call>{"name": ', "<tool_call>[1]</tool_call>", "<tool_call>nonsense</tool_call>"):
        message = response_chat.parse(response_chat.encode(text), 0, TOOLS).message
        assert message.calls[0].error and message.text == text


def test_an_unknown_format_is_told_which_there_are():
    with pytest.raises(InvalidInput, match=f"choose from {', '.join(FORMAT_NAMES)}"):
        open_renderer(hermes_tokenizer(), "herms")
    with pytest.raises(InvalidInput, match="without a response_template"):
        open_renderer(hermes_tokenizer(), "response")


def test_where_no_format_fits_one_line_says_so(chats):
    with pytest.raises(UnsupportedChat, match=r"does not show tools to the model; give another --tool_format \(auto"):
        require_tools(chats("gemma3"), TOOLS)
    with pytest.raises(UnsupportedChat, match="or give --tool_format tags"):
        open_renderer(tokenizer_of(None))


def test_a_call_is_an_object_with_a_name():
    assert call_from_json({"name": "", "arguments": {}}, "", 0).error == 'the call has no "name"'


TEXTS = ["{1, 2}", '{"name": "Ann", "age": 3}', '{"a": 1} and so', '{"answer": 3}', '{"parameters": {}}']


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_of_llama_that_begins_with_a_brace_is_no_call(text):
    assert Llama().parse(text, TOOLS) == ParsedOutput(text)


def test_where_there_are_no_tools_llama_calls_none():
    text = '{"name": "search", "parameters": {"query": "a"}}'
    assert Llama().parse(text, TOOLS).calls and Llama().parse(text, ()) == ParsedOutput(text)


def test_what_llama_says_after_a_call_is_no_other_call():
    text = '{"name": "search", "parameters": {"query": "a"}}'
    (call,) = Llama().parse(f"{text}\nI wait {{.", TOOLS).calls
    assert (call.raw, call.end, call.error) == (text, len(text), None)


@pytest.mark.parametrize("levels", [101, 500, 900, 3000])
def test_what_is_nested_too_deeply_to_be_handled_is_refused(levels):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * levels + "]" * levels)
    assert parse_json("[" * 100 + "]" * 100) and parse_json('"' + "[" * levels + '"') == "[" * levels


def test_a_number_too_large_to_be_one_is_refused():
    with pytest.raises(ValueError, match="1e999 is too large a number"):
        parse_json('{"a": 1e999}')


@pytest.mark.parametrize(
    ("written", "read"),
    [('"arguments": "{\\"query\\": \\"a\\"}"', {"query": "a"}), ('"id": 1', {}), ('"arguments": "a"', None)],
)
def test_hermes_reads_arguments_inside_a_string_and_calls_without_any(written, read):
    (call,) = Hermes().parse(f'<tool_call>{{"name": "look", {written}}}</tool_call>', TOOLS).calls
    assert call.arguments == read and (call.error is None) == (read is not None)


def test_a_call_that_is_broken_does_not_swallow_the_next():
    good = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    calls = Hermes().parse(f'<tool_call>{{"name": "look</tool_call> {good}', TOOLS).calls
    assert [call.error is None for call in calls] == [False, True]


def test_an_argument_of_bare_text_ends_at_its_mark():
    said = "<tool_call><function=look><parameter=query>a</parameter> b</parameter></function></tool_call>"
    assert "no argument" in Qwen35().parse(said, TOOLS).calls[0].error
    said = said.replace(" b</parameter>", "<parameter=count>5</parameter>")
    assert Qwen35().parse(said, TOOLS).calls[0].arguments == {"query": "a", "count": 5}

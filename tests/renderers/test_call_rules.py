"""In every tool format: the call that runs is what the text says, or the call is malformed and says what to change."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.arguments import describe_parameters
from agent_r1.core.messages import Message, ToolCall, ToolSpec
from agent_r1.renderers.formats.delimited_formats import CALL_END, CALL_START, Glm, Lfm2, Qwen35
from agent_r1.renderers.formats.detect import TEMPLATE_FORMATS, Response
from agent_r1.renderers.formats.json_formats import CALL_CLOSE, CALL_OPEN, SEPARATOR, DeepSeek, Harmony, Hermes, Llama
from agent_r1.renderers.formats.tags import Tags

VALUES = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "real": {"type": "number"},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "names": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
    "code": {"$ref": "#/$defs/Code"},
    "maybe": {"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]},
    "both": {"allOf": [{"$ref": "#/$defs/Code"}], "description": "a code"},
    "fixed": {"const": "7"},
    "mixed": {"enum": ["auto", 1, True, None]},
    "either": {"anyOf": [{"const": "auto"}, {"type": "integer"}]},
}
DEFS = {"Code": {"enum": ["1", "2", "true", "null", "x"], "type": "string"}}
LOOK = ToolSpec("look", "Look.", {"type": "object", "properties": VALUES, "$defs": DEFS, "required": ["text"]})
NOW = ToolSpec("now", "Tell the time.", {"type": "object", "properties": {"zone": {"type": "string"}}})
TOOLS = (LOOK, NOW)

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"), exclude_characters="<>"), max_size=8)
text = words | st.sampled_from(["7", "1.5", "true", "None", "null", '{"a": 1}', "[1]", '"x"', "", " 7 "])
number = st.floats(allow_nan=False, allow_infinity=False)
plain = st.none() | st.booleans() | st.integers() | number | text
value = st.recursive(plain, lambda some: st.lists(some, max_size=3) | st.dictionaries(words, some, max_size=3))
OPTIONAL = {
    **{"whole": st.integers(), "real": number, "flag": st.booleans(), "nothing": st.none()},
    **{"names": st.lists(text, max_size=3), "options": st.dictionaries(words, value, max_size=3)},
    **{name: st.sampled_from(DEFS["Code"]["enum"]) for name in ("code", "both")},
    # None and the text "null" are written alike in XML, so a null that is allowed comes first
    "maybe": st.sampled_from(["1", "2", "true", "x", None]),
    **{"fixed": st.just("7"), "mixed": st.sampled_from(["auto", 1, True, None])},
    "either": st.just("auto") | st.integers(),
}
arguments = st.fixed_dictionaries({"text": text}, optional=OPTIONAL)


def dumped(values):
    return json.dumps(values, ensure_ascii=False)


def bare(value):
    return value if isinstance(value, str) else dumped(value)


def xml(opening, closing):
    return lambda values: "".join(f"{opening.format(key)}{bare(value)}{closing}" for key, value in values.items())


def response():
    tokenizer = hermes_tokenizer()
    call = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
    call["transform"] = {"type": "function", "function": "{content}"}
    content = {"close": "<|im_end|>", "repeats": True, "join": ""}
    start = {"start_anchor": "<|im_start|>assistant\n", "defaults": {"role": "assistant"}}
    tokenizer.response_template = {**start, "fields": {"content": content, "tool_calls": call}}
    return Response(tokenizer)


CALLS = [(Hermes(), "<tool_call>@</tool_call>"), (Llama(), "<|python_tag|>@"), (response(), "<tool_call>@</tool_call>")]
"""The formats whose call is one JSON object, which stands at ``@``."""

ARGUMENTS = [
    *((known, around.replace("@", '{"name": "look", "arguments": @}')) for known, around in CALLS),
    (DeepSeek(), f"{CALL_OPEN}function{SEPARATOR}look\n```json\n@\n```{CALL_CLOSE}"),
    (Harmony(), "<|channel|>commentary to=functions.look<|message|>@"),
    (Tags(), "<look>@</look>"),
]
"""The formats whose arguments are one JSON object, which stands at ``@``."""

QWEN, GLM = xml("<parameter={}>\n", "\n</parameter>\n"), xml("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
WRITTEN = [
    *((known, lambda values, around=around: around.replace("@", dumped(values))) for known, around in ARGUMENTS),
    (Qwen35(), lambda values: f"<tool_call>\n<function=look>\n{QWEN(values)}</function>\n</tool_call>"),
    (Glm(), lambda values: f"<tool_call>look\n{GLM(values)}</tool_call>"),
    (Lfm2(), lambda values: f"{CALL_START}[look({', '.join(f'{k}={v!r}' for k, v in values.items())})]{CALL_END}"),
]
IDS = [known.name for known, _ in WRITTEN]


def only_call(known, text):
    (call,) = known.parse(text, TOOLS).calls
    return call


def same(one, other):
    """Return whether two values are equal and have the same types at every place."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def test_every_format_is_here():
    assert {known.name for known in TEMPLATE_FORMATS} | {"tags", "response"} == set(IDS)


@pytest.mark.parametrize(("known", "write"), WRITTEN, ids=IDS)
@settings(max_examples=60)
@given(given_values=arguments)
def test_values_of_every_type_are_read_back(known, write, given_values):
    call = only_call(known, write(given_values))
    assert call.error is None and same(dict(call.arguments), given_values)


keys = st.sampled_from(["name", "arguments", "parameters", "args", "input", "query", "text", "id", "type", "function"])
entries = st.lists(
    st.tuples(keys, st.sampled_from(["look", "function", None, "", 7, "{}", '{"text": "a"}', "[]"]) | arguments),
    max_size=4,
)


@pytest.mark.parametrize(("known", "around"), CALLS, ids=IDS[:3])
@settings(max_examples=200)
@given(entries=entries)
def test_a_json_call_is_what_its_keys_say_or_malformed(known, around, entries):
    entries = [("name", "look"), *entries]
    call = only_call(known, around.replace("@", f"{{{', '.join(f'{dumped(k)}: {dumped(v)}' for k, v in entries)}}}"))
    held = dict(entries)
    named = [held[key] for key in ("arguments", "parameters") if key in held]
    wrong = (
        len(held) < len(entries) or held.keys() - {"name", "arguments", "parameters", "id", "type"} or len(named) > 1
    )
    said = json.loads(named[0]) if named and isinstance(named[0], str) and named[0] and named[0][0] in "{[" else None
    said = said if said is not None else named[0] if named else {}
    if wrong or held.get("type", "function") != "function" or (said not in (None, "") and not isinstance(said, dict)):
        assert call.arguments is None and len(call.error) > 10
    else:
        assert (call.name, call.error) == ("look", None) and same(dict(call.arguments), said or {})


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ('"parameters": {"text": "a"}', None),
        ('"arguments": {"text": "a"}, "id": "call_1", "type": "function"', None),
        ('"args": {"text": "a"}', "no key 'args'"),
        ('"input": {"text": "a"}', "no key 'input'"),
        ('"kwargs": {"text": "a"}', "no key 'kwargs'"),
        ('"text": "a"', "no key 'text'"),
        ('"arguments": {}, "text": "a"', "no key 'text'"),
        ('"Arguments": {"text": "a"}', "no key 'Arguments'"),
        ('"arguments": {"text": "a"}, "parameters": {"text": "b"}', "give one of them"),
        ('"type": "code", "arguments": {"text": "a"}', 'the "type" of a call is "function", got \'code\''),
        ('"arguments": ["a"]', "got array"),
        ('"arguments": {"text": "a"}, "arguments": {"text": "b"}', "'arguments' is given twice"),
        ('"arguments": {"text": "a", "text": "b"}', "'text' is given twice"),
        ('"arguments": {"text": "a", "options": {"k": 1, "k": 2}}', "'k' is given twice"),
        ('"name": "now", "arguments": {"text": "a"}', "'name' is given twice"),
        ('"arguments": "{\\"text\\": \\"a\\", \\"text\\": \\"b\\"}"', "'text' is given twice"),
    ],
)
@pytest.mark.parametrize(("known", "around"), CALLS, ids=IDS[:3])
def test_a_key_that_a_call_does_not_have_is_named(known, around, keys, reason):
    call = only_call(known, around.replace("@", f'{{"name": "look", {keys}}}'))
    if reason is None:
        assert (call.arguments, call.error) == ({"text": "a"}, None)
    else:
        assert call.arguments is None and reason in call.error


@pytest.mark.parametrize("nothing", ["{}", "null", "", " \n", '""'])
@pytest.mark.parametrize(("known", "around"), ARGUMENTS[:5], ids=IDS[:5])
def test_missing_empty_and_null_arguments_are_none(known, around, nothing):
    if not nothing.strip() and '"arguments"' in around:
        around = around.replace(', "arguments": @', "")
    if nothing == '""' and '"arguments"' not in around:
        return  # a text in the place of an object
    call = only_call(known, around.replace("@", nothing))
    assert (call.arguments, call.error) == ({}, None)


@pytest.mark.parametrize(
    "values",
    [
        '{"text": "a", "text": "b"}',
        '{"text": NaN}',
        '{"text": 1e999}',
        '{"options": {"k": 1, "k": 1}}',
        '{"names": [{"a": 1, "a": 2}], "text": ""}',
    ],
)
@pytest.mark.parametrize(("known", "around"), ARGUMENTS, ids=IDS[:6])
def test_arguments_that_json_would_change_are_malformed(known, around, values):
    call = only_call(known, around.replace("@", values))
    assert call.arguments is None and any(why in call.error for why in ("given twice", "not JSON", "too large"))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("options={'k': 1, 'k': 2}", "'k' is given twice"),
        ("options={1: 'a'}", "the key 1 is no text"),
        ("options={'a': {True: 2}}", "the key True is no text"),
        ("names={'a'}", "cannot be read"),
        ("text=b'a'", "cannot be read"),
        ("real=float('nan')", "cannot be read"),
        ('options={"k": 1, "k": null}', "'k' is given twice"),
    ],
)
def test_a_python_value_that_json_would_change_is_malformed(written, reason):
    call = only_call(Lfm2(), f"{CALL_START}[look({written})]{CALL_END}")
    assert call.arguments is None and reason in call.error


@pytest.mark.parametrize(("known", "write"), WRITTEN[6:8], ids=IDS[6:8])
@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("code", "1", "1"),
        ("code", "true", "true"),
        ("code", "3", "3"),  # not allowed, and refused as a text
        ("maybe", "2", "2"),
        ("maybe", "null", None),
        ("both", "null", "null"),
        ("fixed", "7", "7"),
        ("mixed", "1", 1),
        ("mixed", "auto", "auto"),
        ("either", "5", 5),
        ("either", "auto", "auto"),
        ("whole", "x", "x"),
    ],
)
def test_the_declared_type_decides(known, write, name, text, read):
    call = only_call(known, write({name: text}))
    assert (call.error, call.arguments) == (None, {name: read}) and type(call.arguments[name]) is type(read)


@pytest.mark.parametrize(("known", "write"), WRITTEN[6:8], ids=IDS[6:8])
@pytest.mark.parametrize(
    ("name", "text"), [("options", '{"a": 1, "a": 2}'), ("names", "[1"), ("options", '{"a": NaN}')]
)
def test_an_object_in_xml_that_is_not_json_is_malformed(known, write, name, text):
    assert "a value cannot be read" in only_call(known, write({name: text})).error


TREE = {"$ref": "#/definitions/T"}
NESTED = {
    "type": "object",
    "$ref": "#/definitions/Base",
    "allOf": [{"properties": {"level": {"$ref": "#/definitions/a~1b%20c"}}}],
    "definitions": {
        "Base": {
            "properties": {"size": {"oneOf": [{"const": "1"}, {"const": "2"}]}, "tree": {"$ref": "#/definitions/T"}}
        },
        "a/b c": {"$ref": "#/definitions/Level"},
        "Level": {"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]},
        "T": {"anyOf": [{"type": "string"}, {"type": "array", "items": TREE}]},
    },
    "additionalProperties": {"type": "string"},
}


@pytest.mark.parametrize(("known", "write"), WRITTEN[6:8], ids=IDS[6:8])
@pytest.mark.parametrize(
    ("name", "read"), [("size", "1"), ("level", "7"), ("tree", "7"), ("tree", [["7"]]), ("more", "7")]
)
def test_references_are_followed_wherever_they_stand(known, write, name, read):
    (call,) = known.parse(write({name: read}), (ToolSpec("look", "Look.", NESTED),)).calls
    assert call.arguments == {name: read}


def test_a_reference_to_itself_ends():
    schema = {
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "other.json#/x"}},
        "$defs": {"A": {"$ref": "#/$defs/A"}},
    }
    assert describe_parameters(schema) == "a (anything, optional), b (anything, optional)"


def test_allowed_values_are_named_in_descriptions_and_in_tags():
    described = describe_parameters(LOOK.parameters)
    for part in (
        "code (one of '1', '2', 'true', 'null', 'x', optional)",
        "maybe (one of '1', '2', 'true', 'null', 'x' or null, optional)",
        "fixed ('7', optional)",
        "mixed (one of 'auto', 1, true, null, optional)",
        "either ('auto' or integer, optional)",
        "names (array of string, optional)",
    ):
        assert part in described
    assert described in Tags().tool_instructions(TOOLS)
    unit = ToolSpec("unit", "Choose.", {"properties": {"code": VALUES["code"]}, "$defs": DEFS, "required": ["code"]})
    assert "<unit>code</unit> Choose. Arguments: code (one of '1'," in Tags().tool_instructions((unit,))
    assert Tags().parse("<unit>1</unit>", (unit,)).calls[0].arguments == {"code": "1"}


def test_an_empty_call_in_tags_has_no_arguments_unless_one_is_required():
    assert only_call(Tags(), "<now></now>").arguments == {}
    assert only_call(Tags(), "<now>Z</now>").arguments == {"zone": "Z"}
    bare = ToolSpec("ping", "Ping.", {"type": "object", "properties": {}})
    for inside in ("", " ", "\n", "{}", "null"):
        (call,) = Tags().parse(f"<ping>{inside}</ping>", (bare,)).calls
        assert (call.arguments, call.error) == ({}, None)


@pytest.mark.parametrize("known", [Llama(), Lfm2()], ids=["llama3", "lfm2"])
def test_calls_that_a_client_sends_are_written_with_their_names(known):
    given = [ToolCall(f"c{n}", "look", {"text": word}, dumped({"text": word})) for n, word in enumerate("ab")]
    written = known.write_message(Message.assistant("", tuple(given)))["content"]
    assert [(call.name, call.arguments) for call in known.parse(written, TOOLS).calls] == [
        ("look", {"text": "a"}),
        ("look", {"text": "b"}),
    ]

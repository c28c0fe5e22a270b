"""Local templates: which templates are local, and turns after a shortened conversation equal turns after the whole."""

import random
from dataclasses import replace

import pytest
from benchmark_files import real_data
from chat_templates import MODELS, SEARCH, TEMPLATES, real_tokenizer, tokenizer_of

from agent_r1.core.messages import Message, ToolCall
from agent_r1.renderers import byte_tokenizer, template_renderer
from agent_r1.renderers.formats.detect import TEMPLATE_FORMATS, open_renderer
from agent_r1.renderers.formats.tags import PLAIN_TEMPLATE, Tags
from agent_r1.renderers.template_environment import LimitedEnvironment
from agent_r1.renderers.template_locality import Locality, find_locality, lacks_one_part
from agent_r1.renderers.template_renderer import TemplateRenderer

LOCAL = {
    "qwen2_5": Locality(first=1, near=1),
    "qwen3_instruct_2507": Locality(first=1, near=1),
    "llama3_1": Locality(first=3, near=3),  # leaves out the system message and the first message of the user
}
WHOLE = {  # why the whole conversation is rendered
    "qwen3": "the index of the last question",
    "qwen3_5_think": "the index of the last question",
    "glm4moe": "the index of the last question",
    "qwen2_5_vl": "numbers the images",
    "llama3_2": "the date",
    "gemma3": "odd and even messages",
    "gptoss": "reads later messages",
    "deepseekv3": "whether the message before is a tool result, in a variable",
}


def locality_of(source):
    return find_locality(LimitedEnvironment().syntax_tree(source))


@pytest.mark.parametrize("name", [*LOCAL, *WHOLE])
def test_which_real_templates_are_local(name):
    assert locality_of(real_tokenizer(name).chat_template) == LOCAL.get(name)


def test_the_tables_name_all_templates():
    assert {*LOCAL, *WHOLE} == set(MODELS)


@real_data
def test_all_templates_are_tested():
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(MODELS)


def test_the_templates_of_this_package_are_local():
    for source in (byte_tokenizer.TEMPLATE, byte_tokenizer.byte_tokenizer(images=True).chat_template, PLAIN_TEMPLATE):
        assert locality_of(source) == Locality(first=1, near=1)


def looped(body, before="", after="", messages="messages"):
    return f"{before}{{% for m in {messages} %}}{body}<|im_start|>{{{{ m.content }}}}<|im_end|>{{% endfor %}}{after}"


LOCAL_SOURCES = [
    looped("{{ 'a' if loop.index0 == 3 }}"),
    looped("{{ 'a' if loop.index0 - 60 == 1 }}"),
    looped("{{ 'a' if loop.index + 1 > 4 }}"),
    looped("{{ 'a' if loop.first or messages[loop.index0 - 1].role == 'tool' }}"),
    looped("{{ 'a' if loop.last or messages[loop.index].role == 'tool' }}"),
    looped("{{ 'a' if loop.previtem and loop.previtem.role == 'tool' }}"),
    looped("{% set x = m.role %}{{ x }}{% for c in m.tool_calls or [] %}{{ loop.index }}{% endfor %}"),
    looped("{% for c in m.tool_calls or [] %}{{ loop.cycle('a', 'b') }}{{ loop.changed(c.id) }}{% endfor %}"),
    looped(
        "", before="{% for t in tools or [] %}{% for k, v in t | items %}{{ k }}{{ loop.last }}{% endfor %}{% endfor %}"
    ),
    looped("", before="{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"),
    looped("", after="{{ 'a' if messages[-1].role == 'tool' }}"),
    looped(
        "{{ ns.a }}", before="{% set ns = namespace(a=1) %}{% for t in tools or [] %}{% set ns.a = 2 %}{% endfor %}"
    ),
    looped("{{ name(m.role) }}", before="{% macro name(role) %}{{ role | upper }}{% endmacro %}"),
    "{% if tools %}" + looped("a") + "{% else %}" + looped("b") + "{% endif %}",
    looped("", before="{% if messages | length > 2 %}a{% endif %}", messages="messages[1:]"),
]
OTHER_SOURCES = [
    looped("{{ loop.index }}"),
    looped("{{ loop.revindex }}"),
    looped("{{ 'a' if loop.index0 % 2 }}"),
    looped("{{ loop.cycle('a', 'b') }}"),
    looped("{{ 'a' if loop.changed(m.role) }}"),
    looped("{% set outer = loop %}{{ outer.index }}"),
    looped("{{ loop['index'] }}"),
    looped("{{ messages | length }}"),
    looped("{{ messages[-1].role }}"),
    looped("{{ messages[loop.index0 - 1].role }}"),  # the last message, in the first round
    looped("{{ 'a' if loop.first or messages[loop.index0 - 2].role == 'tool' }}"),
    looped("{{ (messages | last).role }}"),
    looped("{{ messages }}"),
    looped("{% for other in messages %}{{ other.role }}{% endfor %}"),
    looped("{% set ns.n = ns.n + 1 %}{{ ns.n }}", before="{% set ns = namespace(n=0) %}"),
    looped("{{ name() }}", before="{% macro name() %}{{ messages | length }}{% endmacro %}"),
    looped("{{ name() }}", before="{% macro name() %}{% set ns.a = 1 %}{% endmacro %}{% set ns = namespace() %}"),
    looped("{{ turns.next() }}", before="{% set turns = cycler('a', 'b') %}"),
    looped("{{ comma() }}", before="{% set comma = joiner() %}"),
    looped("{{ numbers | first }}", before="{% set numbers = range(99) | map('string') %}"),
    looped("{{ letters | first }}", before="{% set letters | map('upper') %}a to z{% endset %}"),
    looped(
        "{{ ns.all | first }}",
        before="{% set ns = namespace() %}{% for n in [range(99) | map('string')] %}{% set ns.all = n %}{% endfor %}",
    ),
    looped(
        "{{ ns.turns | first }}",
        before="{% set ns = namespace() %}{% for n in range(99) %}{% set ns.turns = loop %}{% break %}{% endfor %}",
    ),
    looped(
        "{{ 'a' if m.role == 'user' and ns.is_new(m.content) }}",
        before="{% set ns = namespace() %}{% for n in [1] %}{% set ns.is_new = loop.changed %}{% endfor %}",
    ),
    looped("{% for n in [1] if loop.index0 % 2 %}a{% endfor %}"),  # the loop over the messages
    looped("{{ name() }}", before="{% macro name() %}{{ all | length }}{% endmacro %}{% set all = messages %}"),
    "{% if documents %}{% elif tools %}"
    + looped("")
    + "{% elif messages[-1].role == 'tool' %}a{% else %}"
    + looped("")
    + "{% endif %}",
    looped("{{ last.role }}", before="{% set last = messages[-1] %}"),
    looped("{{ last.role }}", before="{% set last = messages | last %}"),
    looped("{% if m.role == 'tool' %}{% break %}{% endif %}"),
    looped("", before="{{ strftime_now('%H') }}"),
    looped("", before="{% filter upper %}", after="{% endfilter %}"),
    looped("", before="{% set all %}", after="{% endset %}{{ all | trim }}"),
    looped("", messages="messages[::-1]"),
    looped("", messages="messages if true"),
    looped("") + looped(""),
    "{% for t in tools or [1] %}" + looped("") + "{% endfor %}",
    "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "{{ messages[0].content }}",
]


def test_how_many_messages_at_the_beginning_a_comparison_distinguishes():
    assert locality_of(looped("{{ 'a' if loop.index0 - 60 == 1 }}")) == Locality(first=62, near=1)
    assert locality_of(looped("{{ 'a' if loop.index + 1 > 4 }}")) == Locality(first=3, near=1)
    assert locality_of(looped("", before="{{ 'a' if messages | length > 4 }}")) == Locality(first=5, near=1)


@pytest.mark.parametrize("source", LOCAL_SOURCES)
def test_a_template_that_reads_neighbors_is_local(source):
    assert locality_of(source) is not None


@pytest.mark.parametrize("source", OTHER_SOURCES)
def test_a_template_that_could_read_more_is_not_local(source):
    assert locality_of(source) is None


# ---- turns after a shortened conversation


def conversation(seed, turns, system=True):
    """Return a conversation of calls, answers, several results of a turn and questions in a random order."""
    rng = random.Random(seed)
    messages = [Message.system("Be brief.")] * system + [Message.user(f"question {seed}")]
    for turn in range(turns):
        if rng.random() < 0.7:
            calls = tuple(
                ToolCall(f"call_{turn}_{n}", "search", {"query": f"q{turn}{n}"}, "") for n in range(rng.randint(1, 2))
            )
            messages.append(Message.assistant("", calls))
            messages += [Message.tool(f"page {rng.randint(0, 99)}", call.id) for call in calls]
        else:
            messages += [Message.assistant(f"answer {turn}"), Message.user(f"and {rng.randint(0, 99)}?")]
    return tuple(messages)


def play(renderer, messages, tools):
    """Return the prompts of all turns that follow the first action of a conversation."""
    prompts, start = [], first_action(messages)
    prompt = renderer.render(messages[:start], tools)
    actions = [index for index, message in enumerate(messages) if message.role == "assistant"]
    for turn, (index, following) in enumerate(zip(actions, [*actions[1:], len(messages)], strict=True)):
        before, observation = messages[:index], messages[index + 1 : following]
        written = renderer.render_text(messages[: index + 1], tools).removeprefix(prompt.text)
        if turn % 5 == 4:  # the policy words the action differently from the template
            written = written.replace('": "', '":"')
        ids = renderer.encode(written.rstrip("\n").removesuffix("<eos>"))  # the plain template ends no other action
        action = replace(renderer.parse(ids, turn, tools), message=messages[index])
        prompts.append(renderer.bridge_to_next_turn(prompt, before, action, ids, observation, tools))
        prompt = prompts[-1] or renderer.render(messages[:following], tools)
    return prompts


def as_whole(monkeypatch):
    monkeypatch.setattr(Locality, "without_middle", lambda self, messages: messages)


def renderer_of(name):
    if name == "plain":
        tokenizer = tokenizer_of(None)
        return open_renderer(tokenizer, "tags")
    if name == "byte":
        return open_renderer(byte_tokenizer.byte_tokenizer())
    model, _, tool_format = name.partition(" ")
    return open_renderer(real_tokenizer(model), tool_format or "auto")


def renderer_of_source(source):
    return TemplateRenderer(tokenizer_of(source, special=["<|im_start|>", "<|im_end|>"]))


def first_action(messages):
    return next(index for index, message in enumerate(messages) if message.role == "assistant")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*LOCAL, "llama3_1 tags", "qwen2_5 tags", "plain", "byte"])
def test_bridges_equal_those_of_the_whole_conversation(name, seed, monkeypatch):
    messages, renderer = conversation(seed, 30, system=seed != 1), renderer_of(name)
    tools = (SEARCH,) if seed != 2 else ()
    bridges = play(renderer, messages, tools)
    as_whole(monkeypatch)
    assert bridges == play(renderer, messages, tools)
    assert sum(bridge is not None for bridge in bridges) >= 20


@pytest.mark.parametrize("source", LOCAL_SOURCES)
def test_bridges_of_any_local_template_equal_those_of_the_whole_conversation(source, monkeypatch):
    messages, renderer = conversation(5, 40), renderer_of_source(source)
    bridges = play(renderer, messages, ())
    as_whole(monkeypatch)
    assert bridges == play(renderer, messages, ())


def rendered_messages(renderer, messages, monkeypatch):
    """Return the number of messages that the template gets in each bridge of a conversation."""
    counts, apply = [], template_renderer.apply_chat_template

    def counted(tokenizer, converted, *args, **kwargs):
        counts.append(len(converted))
        return apply(tokenizer, converted, *args, **kwargs)

    monkeypatch.setattr(template_renderer, "apply_chat_template", counted)
    prompt, found = renderer.render(messages[: first_action(messages)]), []
    for index in range(first_action(messages), len(messages), 2):
        counts.clear()
        ids = (*renderer.encode(messages[index].text), renderer.end_token_id)
        action, observation = renderer.parse(ids), messages[index + 1 : index + 2]
        prompt = renderer.bridge_to_next_turn(prompt, messages[:index], action, ids, observation)
        found.append(sum(counts))
    return found


def long_chat(turns):
    answers = [(Message.assistant(f"answer {n}"), Message.user(f"question {n}")) for n in range(turns)]
    return (Message.user("Hello."), *(message for pair in answers for message in pair))


def test_the_messages_of_a_bridge_do_not_grow_with_the_turns_of_a_local_template(monkeypatch):
    counts = rendered_messages(renderer_of("byte"), long_chat(200), monkeypatch)
    assert max(counts) < 40
    assert counts[-1] == counts[100] < 20


def test_a_template_that_is_not_local_renders_the_whole_conversation(monkeypatch):
    renderer = renderer_of_source(looped("{{ loop.index }}"))
    assert rendered_messages(renderer, long_chat(50), monkeypatch)[-1] >= 101


def test_a_prompt_of_other_tools_is_not_continued():
    renderer, messages = renderer_of("byte"), long_chat(30)
    prompt = renderer.render(messages, (SEARCH,))
    ids = (*renderer.encode("Yes."), renderer.end_token_id)
    turn = (messages, renderer.parse(ids), ids, (Message.user("And?"),))
    assert renderer.bridge_to_next_turn(prompt, *turn, (SEARCH,)) is not None
    assert renderer.bridge_to_next_turn(prompt, *turn) is None


def test_a_template_that_refuses_the_shortened_conversation_gets_the_whole():
    gap = (
        "m.content.isdigit() and loop.previtem.content.isdigit() and m.content | int > loop.previtem.content | int + 1"
    )
    source = looped("{% if loop.previtem and " + gap + " %}{{ raise_exception('a gap') }}{% endif %}")
    assert locality_of(source) == Locality(first=1, near=1)
    renderer, roles = renderer_of_source(source), (Message.user, Message.assistant)
    messages = tuple(roles[number % 2](str(number)) for number in range(61))
    ids = (*renderer.encode("61"), renderer.end_token_id)
    found = renderer.bridge_to_next_turn(
        renderer.render(messages), messages, renderer.parse(ids), ids, (Message.user("62"),)
    )
    assert found.text == renderer.render_text((*messages, Message.assistant("61"), Message.user("62")))


def test_without_middle_keeps_the_beginning_and_the_end():
    messages = long_chat(40)
    assert Locality(first=1, near=1).without_middle(messages) == (*messages[:3], *messages[-4:])
    assert Locality(first=2, near=3).without_middle(messages) == (*messages[:5], *messages[-12:])
    assert Locality(first=1, near=1).without_middle(messages[:19]) == messages[:19]


@pytest.mark.parametrize(
    ("short", "whole", "expected"),
    [
        ("abef", "abcdef", True),
        ("", "abc", True),
        ("abc", "abc", True),
        ("aba", "ababa", True),
        ("abc", "ab", False),
        ("abxf", "abcdef", False),
        ("aa", "aba", True),
        ("aaa", "aba", False),
    ],
)
def test_whether_a_text_is_another_without_one_part(short, whole, expected):
    assert lacks_one_part(short, whole) is expected


@pytest.mark.parametrize("tool_format", [*(kind() for kind in TEMPLATE_FORMATS), Tags()], ids=lambda each: each.name)
@pytest.mark.parametrize("seed", range(3))
def test_tool_formats_convert_what_stands_before_an_action_alone(tool_format, seed):
    messages = conversation(seed, 12)
    converted = tool_format.to_template(messages, (SEARCH,))
    for index in (index for index, message in enumerate(messages) if message.role == "assistant"):
        before, after = (tool_format.to_template(part, (SEARCH,)) for part in (messages[:index], messages[index:]))
        assert converted == [*before, *after]
        assert [message["role"] for message in after].count("assistant") == sum(
            message.role == "assistant" for message in messages[index:]
        )

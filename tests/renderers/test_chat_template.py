"""Chat templates: rendered as transformers does, with limits that no template passes."""

import pytest
from chat_templates import MODELS, SEARCH, real_tokenizer, tokenizer_of
from hostile_templates import ALLOWED_FORMATS, EXPENSIVE, FAILING, REFUSED_FORMATS
from tests_tokenizer import hermes_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1.core.errors import InvalidInput, UnsupportedChat
from agent_r1.core.messages import Message
from agent_r1.renderers.chat_template import ChatTemplate, apply_chat_template
from agent_r1.renderers.formats.detect import open_renderer
from agent_r1.renderers.template_budget import Budget, BudgetExceeded

USER = {"role": "user", "content": "Who rules <Älba>?"}
PAGE = {"role": "tool", "content": "A page.", "tool_call_id": "c"}


def call(**arguments):
    function = {"name": "search", "arguments": arguments}
    calls = [{"type": "function", "id": "c", "function": function}]
    return {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls}


CONVERSATIONS = [
    [USER],
    [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "<think>a</think> Bruno"},
        USER,
    ],
    [USER, call(query="Al'ba", n=[1.5, {"a": None}], b=True)],
    [USER, call(query="A"), PAGE, call(query="B"), PAGE, {"role": "assistant", "content": "Bruno"}, USER],
]


def as_transformers(tokenizer, messages, tools, added):
    try:
        return tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=added, tokenize=False)
    except Exception:
        return None


def as_we_do(tokenizer, messages, tools, added):
    try:
        return apply_chat_template(tokenizer, messages, tools, add_generation_prompt=added)
    except UnsupportedChat:
        return None


FEATURES = """\
{%- macro show(x, n=2) %}{{ x | indent(n) }}{{ caller() if caller else '' }}{% endmacro -%}
{% set ns = namespace(total=0, seen=[], text='') %}
{% for m in messages recursive %}
  {%- if loop.index > 9 %}{% break %}{% endif %}
  {% set ns.seen = ns.seen + [m.role] %}{% set ns.text = ns.text ~ loop.revindex ~ m['content'][:3] ~ 1 %}
  {{ loop.length }}{{ loop.cycle('a', 'b') }}{{ loop.previtem.role if not loop.first }}{{ m.content.split(' ') | last }}
  {% generation %}{{ show(m.content | upper) }}{% endgeneration %}
{% else %}none{% endfor %}
{% call show('a\\nb', 4) %} called {% endcall %}{% set block %}{{ ns.seen | join(', ') }}{% endset %}
{{ block }}{{ ns.text }}{{ (1, 'a') }}
{{ {'b': [1, none]} | tojson(indent=2) }}{{ '%s-%03d' % ('x', 7) }}{{ 7 // 2 * 2.5 }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ 'user' in ns.seen }}{{ messages[-1:] | length }}
{{ undefined_name }}{{ bos_token }}{{ tools | tojson if tools else 'no tools' }}
{{ dict(a=1).items() | list }}{{ -3 | abs }}
{{ messages | map(attribute='role') | unique | sort(reverse=true) | join('|') }}
{{ '{:>5}'.format('ab') }}{{ documents }}
{{- ['b', 'a'] | sort | first }}{{ ' a ' | trim ~ 'x' | replace('x', 'yy') }}
{{ range(3) | list }}{{ 'a' if 1 < 2 <= 2 }}
"""


@pytest.mark.parametrize("source", [FEATURES, hermes_tokenizer().chat_template])
def test_a_template_renders_as_with_transformers(source):
    tokenizer = tokenizer_of(source)
    for messages in CONVERSATIONS:
        for tools in ([], [SEARCH.to_openai()]):
            for added in (True, False):
                expected = as_transformers(tokenizer, messages, tools, added)
                assert expected is not None and as_we_do(tokenizer, messages, tools, added) == expected


@pytest.mark.parametrize("name", MODELS)
def test_templates_of_models_render_as_with_transformers(name):
    tokenizer = real_tokenizer(name)
    for messages in CONVERSATIONS:
        for tools in ([], [SEARCH.to_openai()]):
            expected = as_transformers(tokenizer, messages, tools, True)
            assert as_we_do(tokenizer, messages, tools, True) == expected


def render(source, content="Who?"):
    return apply_chat_template(
        tokenizer_of(source), [{"role": "user", "content": content}], (), add_generation_prompt=True
    )


@pytest.mark.parametrize("name", [*FAILING, *REFUSED_FORMATS])
def test_a_template_that_fails_is_an_error_of_one_line(name):
    with pytest.raises(UnsupportedChat, match=r"the chat template (cannot render this conversation|is not valid)") as e:
        render((FAILING | REFUSED_FORMATS)[name])
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


@pytest.mark.parametrize("source", ALLOWED_FORMATS)
def test_formats_of_ordinary_size_are_written_as_with_transformers(source):
    assert render(source) == ALLOWED_FORMATS[source] == as_transformers(tokenizer_of(source), [USER], (), True)


@pytest.mark.parametrize("name", EXPENSIVE)
def test_a_template_that_computes_too_much_is_an_error_of_one_line(name):
    with pytest.raises(InvalidInput, match=r"^chat template: got .*(characters|steps|too large)") as e:
        render(EXPENSIVE[name])
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ 'a' }}\n{{ 1/0 }}", r"line 2: ZeroDivisionError: division by zero"),
        ("\n\n{% for %}", r"line 3: Expected an expression"),
        ("{% macro f() %}\n{{ 1 + 'a' }}\n{% endmacro %}\n{{ f() }}", r"line 2: TypeError"),
        ("\n{{ raise_exception('no system message') }}", r"line 2: no system message$"),
    ],
)
def test_an_error_names_the_line_of_the_template(source, error):
    with pytest.raises(UnsupportedChat, match=error):
        render(source)


def test_a_template_that_computes_too_much_is_refused_by_each_format_at_once():
    """Detection renders a template many times; it stops at the first render that is too expensive."""
    with pytest.raises(InvalidInput, match="line 1: it takes more than"):
        open_renderer(tokenizer_of(EXPENSIVE["nested loops"]))


def test_long_conversations_may_take_more_steps():
    source = "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    text = "ab" * 100_000
    assert render(source, text) == text


def test_a_render_is_limited_by_its_own_processor_time(monkeypatch):
    seconds = iter(range(10**6))
    monkeypatch.setattr("time.thread_time", lambda: next(seconds))
    budget = Budget(0)
    with pytest.raises(BudgetExceeded, match="more than 5 s"):
        for _ in range(1000):
            budget.spend(1)


def test_a_step_of_many_characters_checks_the_processor_time(monkeypatch):
    seconds = iter([0.0, 6.0])
    monkeypatch.setattr("time.thread_time", lambda: next(seconds))
    budget = Budget(0)
    budget.spend(1)
    with pytest.raises(BudgetExceeded, match="more than 5 s"):
        budget.spend(1, 1_000_000)


def test_renders_do_not_share_their_budgets():
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}")
    assert [template.render({"messages": [number]}) for number in range(3)] == ["", "", ""]


def count_renders(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an element each time that the template is rendered."""
    rendered: list[int] = []
    generate = template._template.generate
    monkeypatch.setattr(template._template, "generate", lambda data: rendered.append(1) or generate(data))
    return rendered


def test_equal_conversations_are_rendered_once(monkeypatch):
    template = ChatTemplate("{{ messages[0] }}{% if messages[0] == 'c' %}{{ raise_exception('no') }}{% endif %}")
    rendered = count_renders(template, monkeypatch)
    assert [template.render({"messages": [text]}) for text in "abab"] == ["a", "b", "a", "b"]
    assert len(rendered) == 2
    for _ in range(2):
        with pytest.raises(UnsupportedChat, match="no"):
            template.render({"messages": ["c"]})


def test_a_template_that_reads_the_clock_is_rendered_each_time(monkeypatch):
    template = ChatTemplate("{{ strftime_now('%Y') }}")
    rendered = count_renders(template, monkeypatch)
    assert template.render({"messages": []}) == template.render({"messages": []})
    assert len(rendered) == 2


@pytest.mark.parametrize("value", [5, ["a"], True, {"other": "x"}, {"default": 3}])
def test_a_chat_template_that_is_not_a_text_is_an_error(value):
    tokenizer = tokenizer_of("{{ messages }}")
    tokenizer.chat_template = value
    with pytest.raises(UnsupportedChat, match=r"not a text|several chat templates"):
        open_renderer(tokenizer)


def test_text_that_a_tokenizer_cannot_encode_is_an_error_of_one_line():
    words = Tokenizer(models.WordLevel({"a": 0, "<|im_start|>": 1, "<|im_end|>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    renderer = open_renderer(tokenizer)
    assert renderer.render((Message.user("a"),)).token_ids
    with pytest.raises(UnsupportedChat, match=r"cannot encode a conversation: .*give it an unknown token"):
        renderer.render((Message.user("b"),))

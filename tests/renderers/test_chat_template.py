import signal
import threading

import pytest
from chat_templates import tokenizer_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.messages import Message
from agent_r1.renderers.chat_template import apply_chat_template
from agent_r1.renderers.formats.detect import open_renderer


def render(source):
    return apply_chat_template(
        tokenizer_of(source), [{"role": "user", "content": "Who?"}], (), add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ 'a' }}\n{{ 1/0 }}", r"line 2: ZeroDivisionError: division by zero"),
        ("\n\n{% for %}", r"line 3: Expected an expression"),
        ("{% macro f() %}\n{{ 1 + 'a' }}\n{% endmacro %}\n{{ f() }}", r"line 2: TypeError"),
        ("\n{{ raise_exception('no\n' * 1000) }}", r"line 2: no no "),
        ("{% include '/etc/passwd' %}", ""),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    ],
)
def test_a_template_that_fails_is_an_error_of_one_line(source, error):
    with pytest.raises(UnsupportedChat, match=f"the chat template cannot render this conversation: .*{error}") as e:
        render(source)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


def test_a_template_that_loops_for_ever_is_ended_by_an_interrupt():
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    main = threading.main_thread().ident
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        render(source)


@pytest.mark.parametrize("value", [5, ["a"], {"other": "x"}])
def test_a_chat_template_that_is_not_a_text_is_an_error(value):
    tokenizer = tokenizer_of("{{ messages }}")
    tokenizer.chat_template = value
    with pytest.raises(UnsupportedChat, match="the chat template cannot render"):
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

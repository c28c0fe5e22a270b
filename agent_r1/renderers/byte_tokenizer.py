"""A byte-level tokenizer with a small Hermes template, for scripted agents and tests without a model."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1.core.messages import Image

IMAGE_TOKEN = "<|image|>"

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


_SHOW = """\
{%- macro show(content) -%}
{% if content is string %}{{ content }}{% else %}
{%- for part in content %}{{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}
{%- endmacro -%}
"""
"""A macro of the chat template. It writes the content of a message: a text, or a list of texts and images."""


class OneTokenImages:
    """An :class:`~agent_r1.renderers.protocol.ImageExpander` that represents every image by one token."""

    placeholder = IMAGE_TOKEN

    def expand(self, image: Image) -> str:
        return IMAGE_TOKEN


def byte_tokenizer(images: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte. Decoding the tokens of any text gives the same text.

    ``<|im_start|>``, ``<|im_end|>`` and ``<|endoftext|>`` are special tokens; with ``images`` also ``<|image|>``.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *([IMAGE_TOKEN] if images else [])]})
    fast.chat_template = (
        _SHOW + TEMPLATE.replace("message.content }}", "show(message.content) }}") if images else TEMPLATE
    )
    return fast

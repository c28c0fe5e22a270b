"""The word-level tokenizer of tiny-base: one id per word, independent of the text around it.

Reading a page is copying, and copying is easiest to learn if "Alba" has the same id after a space, a quote and a
newline. A word therefore contains no space: two adjacent words have one space between them by convention, and all
other spaces and newlines belong to the punctuation (``": "`` is one token). Inside the tokenizer, ``▁`` marks the
start of a word; words outside the vocabulary are split into characters.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|im_start|>system\\n' + system }}
    {%- if tools %}
        {{- ('\\n\\n' if system else '') + '# Tools\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' + tool | tojson }}
        {%- endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


_WORD = "A-Za-z0-9"
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
_UNKNOWN = "<unk>"
_PHRASES = (
    '\n{"name": "',
    '", "arguments": {"',
    ".\n\n# Tools\n<tools>\n",
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '.", "parameters": {"type": "object", "properties": {"',
    '": {"description": "',
    '", "type": "string"}}, "required": ["',
    '"]}}}\n</tools>',
    "system\n",
    "user\n",
    "assistant\n",
)
"""Texts that the chat format repeats; each is one token, because shorter conversations train faster."""


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary has the words in ``texts`` and the punctuation between them.

    Other ASCII text round-trips too, with more tokens; other characters become ``<unk>``.
    """
    marks = "|".join(map(re.escape, (*_CONTROL, *_TAGS)))
    plain = (part for text in texts for part in re.split(marks, text))
    found = {piece for part in plain for piece, _ in _splitter().pre_tokenize_str(_normalize(part))}
    characters = ["▁", "\n", *string.printable[:95]]
    vocabulary = [*_CONTROL, *_TAGS, _UNKNOWN, *characters, *sorted(found)]
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=_UNKNOWN, ignore_merges=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = _normalizer(), _splitter(), _decoder()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _TAGS])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _CONTROL])
    return _wrap(tokenizer)


def _normalize(text: str) -> str:
    """Return the normalized text."""
    return str(_normalizer().normalize_str(text))


def _normalizer() -> normalizers.Normalizer:
    """Mark the start of each word; a single space between two words becomes the mark."""
    between = normalizers.Replace(Regex(f"(?<=[{_WORD}]) (?=[{_WORD}])"), "▁")
    start = normalizers.Replace(Regex(f"(?<![{_WORD}▁])(?=[{_WORD}])"), "▁")
    return normalizers.Sequence([between, start])


def _splitter() -> pre_tokenizers.PreTokenizer:
    """Split into phrases, words, and the runs of punctuation between them."""
    phrases = sorted((re.escape(_normalize(phrase)) for phrase in _PHRASES), key=len, reverse=True)
    pattern = "|".join([*phrases, f"▁[{_WORD}]+", f"[^{_WORD}▁]+"])
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _decoder() -> decoders.Decoder:
    """Return the inverse of the normalizer: a mark after a word becomes a space, any other mark is removed."""
    start = decoders.Replace(Regex(f"(?<![{_WORD}])▁"), "")
    return decoders.Sequence([decoders.Fuse(), start, decoders.Replace("▁", " ")])


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_UNKNOWN,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=1024,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped

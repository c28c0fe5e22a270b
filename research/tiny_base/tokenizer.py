"""The word-level tokenizer of tiny-base: one id per word, wherever the word stands.

Reading a page is copying, and copying is easiest to learn where "Alba" has one id after a space, a quote and a
newline alike. So a word carries no space: two words side by side have one space between them by convention, and
all other spaces and newlines belong to the punctuation (``": "`` is one token). Inside the tokenizer, ``▁`` marks
where a word starts; words outside the vocabulary fall back to characters.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from research.tiny_base.template import CHAT_TEMPLATE

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
"""Texts that the chat format repeats, one token each: the shorter a conversation, the faster everything."""


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words in ``texts`` and the punctuation between them.

    Other ASCII text round-trips too, in more tokens; other characters become ``<unk>``.
    """
    marks = "|".join(map(re.escape, (*_CONTROL, *_TAGS)))
    plain = (part for text in texts for part in re.split(marks, text))
    found = {piece for part in plain for piece, _ in _splitter().pre_tokenize_str(_marked(part))}
    characters = ["▁", "\n", *string.printable[:95]]
    vocabulary = [*_CONTROL, *_TAGS, _UNKNOWN, *characters, *sorted(found)]
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=_UNKNOWN, ignore_merges=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = _normalizer(), _splitter(), _decoder()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _TAGS])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _CONTROL])
    return _wrapped(tokenizer)


def _marked(text: str) -> str:
    """The text as the normalizer leaves it."""
    return str(_normalizer().normalize_str(text))


def _normalizer() -> normalizers.Normalizer:
    """Marks where words start; a single space between two words becomes the mark."""
    between = normalizers.Replace(Regex(f"(?<=[{_WORD}]) (?=[{_WORD}])"), "▁")
    start = normalizers.Replace(Regex(f"(?<![{_WORD}▁])(?=[{_WORD}])"), "▁")
    return normalizers.Sequence([between, start])


def _splitter() -> pre_tokenizers.PreTokenizer:
    """Splits into phrases, words, and the runs of punctuation between them."""
    phrases = sorted((re.escape(_marked(phrase)) for phrase in _PHRASES), key=len, reverse=True)
    pattern = "|".join([*phrases, f"▁[{_WORD}]+", f"[^{_WORD}▁]+"])
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _decoder() -> decoders.Decoder:
    """The inverse of the normalizer: a mark after a word is a space, any other is nothing."""
    start = decoders.Replace(Regex(f"(?<![{_WORD}])▁"), "")
    return decoders.Sequence([decoders.Fuse(), start, decoders.Replace("▁", " ")])


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
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

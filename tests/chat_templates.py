"""Chat templates of real models with a byte-level tokenizer."""

import re

import pytest
from benchmark_files import ABSENT, SHARED
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1.core.messages import ToolSpec

TEMPLATES = SHARED / "chat_templates"
SPECIAL = r"<\|[^|>]+\|>|<\uff5c[^>]+\uff5c>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>"

SEARCH = ToolSpec(
    "search",
    "Look pages up.",
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)


def tokenizer_of(template, special=()):
    """Return a tokenizer with one token per byte, and the special tokens that the template mentions."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    found = re.findall(SPECIAL, template or "")
    fast.add_special_tokens({"additional_special_tokens": sorted({*found, *special})})
    fast.chat_template = template
    return fast


def real_tokenizer(name, special=()):
    """Return a tokenizer with the template of a model; skip the test if this machine has no templates of models."""
    if not SHARED.is_dir():
        pytest.skip(ABSENT)
    return tokenizer_of((TEMPLATES / f"{name}.jinja").read_text("utf-8"), special)

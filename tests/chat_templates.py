"""Chat templates of real models with a byte-level tokenizer."""

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1.core.tool import ToolSpec

TEMPLATES = Path(__file__).parents[2] / "shared/data/chat_templates"
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
    """Return a tokenizer with the template of a model; skips the test if the template is not available."""
    path = TEMPLATES / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"the chat templates are not beside this checkout: {path}")
    return tokenizer_of(path.read_text(), special)

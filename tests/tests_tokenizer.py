"""The byte-level tokenizer with a small Hermes template, for tests that need a chat and no model."""

from agent_r1.renderers.byte_tokenizer import TEMPLATE, byte_tokenizer

hermes_tokenizer = byte_tokenizer

__all__ = ["TEMPLATE", "hermes_tokenizer"]

"""Settings of the renderers. This module does not import torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

FENCE = "```"
"""The beginning of a fence. A tag in ``TagsConfig`` that begins with this text stands for a code block."""


class TagsConfig(BaseModel):
    """Names of the tags in the tool format ``tags``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    observation: str = Field(default="information", min_length=1)
    """The tag around a tool result."""

    answer: str = Field(default="answer", min_length=1)
    """The tag around a final answer. A closed answer ends the action."""

    names: dict[str, str] = Field(default_factory=dict)
    """The tag around a call of each tool whose tag differs from the name of the tool. A tag that begins with three
    backticks is a fence."""

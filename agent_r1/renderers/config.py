"""Settings of the renderers. This module imports no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

FENCE = "```"
"""The prefix that distinguishes a fenced block from a tag."""


class TagsConfig(BaseModel):
    """Names of the tags in the tool format ``tags``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    observation: str = Field(default="information", min_length=1)
    """The tag around a tool's result."""

    answer: str = Field(default="answer", min_length=1)
    """The tag around a final answer, which ends an action."""

    names: dict[str, str] = Field(default_factory=dict)
    """The tag of each tool whose tag is not its name. A tag that begins with three backticks is a fence."""

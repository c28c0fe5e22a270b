"""Settings of the renderers. Imports no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

FENCE = "```"
"""The prefix that marks a fenced block, as opposed to a tag."""


class TagsConfig(BaseModel):
    """The names in the tool format ``tags``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    observation: str = Field(default="information", min_length=1)
    """The tag around what a tool gives."""

    answer: str = Field(default="answer", min_length=1)
    """The tag around an answer, which ends an action."""

    names: dict[str, str] = Field(default_factory=dict)
    """Tags by the name of a tool, where they are not that name; a fence begins with three backticks."""

"""Settings of the renderers. This module does not import torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

FENCE = "```"
"""Three backticks. A tag that begins with three backticks stands for a code block (see ``TagsConfig``)."""


class TagsConfig(BaseModel):
    """Names of the tags in the tool format ``tags``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    observation: str = Field(default="information", min_length=1)
    """The tag around a tool result."""

    answer: str = Field(default="answer", min_length=1)
    """The tag around a final answer. A closed answer ends the action."""

    names: dict[str, str] = Field(default_factory=dict)
    """The tag around a call, by the name of the tool, such as {"search": "find"}. Tools without an entry have their
    default tag: the name of the tool, but a code fence for ``python``. A tag that begins with three backticks is a code
    fence."""

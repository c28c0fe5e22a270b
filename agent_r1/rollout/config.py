"""Settings of rollouts. This module does not import torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

ContextPolicyName = Literal["append", "window", "truncate", "summary", "evidence"]


class ContextPolicyConfig(BaseModel):
    """How much of a long episode the policy sees before each action."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    name: ContextPolicyName = "append"
    """The context policy: "append" (the policy sees the whole episode), "window", "truncate", "summary" or "evidence";
    see docs/models.md."""

    keep_turns: int = Field(default=2, ge=1)
    """With "window", "truncate" and "evidence": number of latest turns that the policy sees unchanged, if there is
    room. With "summary": the policy writes a summary after keep_turns + 1 turns, or earlier if the context has no room.
    The summary replaces all turns so far."""

    after_tokens: int = Field(default=0, ge=0)
    """The context is not rewritten until it is longer than this number of tokens, or leaves no room for an action."""

    max_characters: int = Field(default=200, ge=1)
    """With the context policy "truncate": number of characters to which each older tool result is cut. The tool results
    of the latest turns (keep_turns) stay whole."""

    max_lines: int = Field(default=3, ge=1)
    """With the context policy "evidence": number of lines that are kept in total from all older tool results. The tool
    results of the latest turns (keep_turns) stay whole."""

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> Self:
        own: tuple[str, ...] = {"truncate": ("max_characters",), "evidence": ("max_lines",)}.get(self.name, ())
        used = {"name"} if self.name == "append" else {"name", "keep_turns", "after_tokens", *own}
        for name, field in type(self).model_fields.items():
            if name not in used and dict(self)[name] != field.default:
                raise ValueError(f"context_policy.{name} has no effect with the policy {self.name}: leave it out")
        return self

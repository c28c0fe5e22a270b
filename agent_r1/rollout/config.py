"""Settings of rollouts. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

ContextPolicyName = Literal["append", "window", "truncate", "summary", "evidence"]


class ContextPolicyConfig(BaseModel):
    """How much of a long episode the policy sees before each action."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    name: ContextPolicyName = "append"
    """append (everything), window, truncate, summary or evidence; see docs/contexts.md."""

    keep_turns: int = Field(default=2, ge=1)
    """The latest turns that are never rewritten; for summary, the number of turns above which they are summarized."""

    after_tokens: int = Field(default=0, ge=0)
    """Nothing is rewritten until the context exceeds this number of tokens."""

    max_characters: int = Field(default=200, ge=1)
    """With truncate: characters kept of each older result."""

    max_lines: int = Field(default=3, ge=1)
    """With evidence: lines kept of all older results."""

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> Self:
        own: tuple[str, ...] = {"truncate": ("max_characters",), "evidence": ("max_lines",)}.get(self.name, ())
        used = {"name"} if self.name == "append" else {"name", "keep_turns", "after_tokens", *own}
        for name, field in type(self).model_fields.items():
            if name not in used and dict(self)[name] != field.default:
                raise ValueError(f"context_policy.{name} has no effect with the policy {self.name}: leave it out")
        return self

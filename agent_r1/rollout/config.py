"""What can be set of how an agent reads and writes. Free of torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

RuleName = Literal["append", "window", "truncate", "summary", "evidence"]


class ViewConfig(BaseModel):
    """The context rule: what of an episode the policy sees before it acts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rule: RuleName = "append"
    """append, window, truncate, summary or evidence; docs/contexts.md says what each does."""

    turns: int = Field(default=2, ge=1)
    """The latest turns that stay as they are; for summary, how many there may be before they are summed up."""

    after: int = Field(default=0, ge=0)
    """Tokens up to which nothing is rewritten."""

    characters: int = Field(default=200, ge=1)
    """With truncate: characters that stay of an older result."""

    pieces: int = Field(default=3, ge=1)
    """With evidence: pieces of older results that stay."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        """A knob that would do nothing is refused."""
        uses = {"append": (), "truncate": ("characters",), "evidence": ("pieces",)}.get(self.rule, ())
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        common = () if self.rule == "append" else ("turns", "after")
        for name in ("turns", "after", "characters", "pieces"):
            if name not in (*uses, *common) and usual[name] != dict(self)[name]:
                raise ValueError(f"view.{name} does nothing with the rule {self.rule}: leave it out")
        return self

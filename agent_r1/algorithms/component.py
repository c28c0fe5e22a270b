"""The base of everything that an algorithm is composed of: frozen, validated data."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

Need = Literal["critic", "group", "greedy", "reference", "teacher", "role_baseline"]
"""A requirement on a run: a value model, several attempts at each task, a greedy attempt at each task, a copy of the
initial policy, a teacher policy, or a running mean return of each role."""

Level = Literal["token", "turn", "trajectory"]
"""The unit that a ratio or a correction belongs to."""

LARGEST = 10**9
"""The largest number that a parameter may have."""


class Component(BaseModel):
    """A part of an algorithm with its settings. Components that can replace each other have different ``name``s."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        ignored_types=(str,),  # a formula without settings may be a plain class attribute
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false for a number: they would count as 1 and 0."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("it should be a number or a name, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _refuse_huge_numbers(cls, value: object) -> object:
        if isinstance(value, int | float) and abs(value) > LARGEST:
            raise ValueError(f"it should be at most {LARGEST:.0e}")
        return value

"""The base class of the parts of an algorithm, which are immutable, validated data."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

Need = Literal["critic", "group", "greedy", "reference", "teacher", "role_baseline"]
"""Something that a run must provide for an algorithm.

critic: a value model. group: several attempts at each task. greedy: a greedy attempt at each task. reference: a copy of
the initial policy. teacher: a teacher policy. role_baseline: a running mean of the returns of each role, in games of
several agents.
"""

Level = Literal["token", "turn", "trajectory"]
"""The unit (token, turn or trajectory) whose tokens share one importance ratio or one correction."""

LARGEST = 10**9
"""Limit on the absolute value of a numeric parameter."""


class Component(BaseModel):
    """The settings of one part of an algorithm, such as the policy loss.

    For some parts, there are several classes to choose from. Each of these classes has a ``name``, such as "clip" for
    PPO's loss.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        ignored_types=(str,),  # a formula without settings can be a plain class attribute
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: object, info: ValidationInfo) -> object:
        """Raise ValueError if a field that is not a bool gets true or false.

        Without this check, pydantic would convert true to 1.
        """
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

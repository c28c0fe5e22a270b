"""The base of everything that an algorithm is composed of: frozen, validated data."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Need = Literal["critic", "group", "greedy", "reference", "teacher"]
"""A requirement on a run: a value model, several attempts at each task, a greedy attempt at each task, a copy of the
initial policy, or a teacher policy."""

Level = Literal["token", "turn", "trajectory"]
"""The unit that a ratio or a correction belongs to."""


class Component(BaseModel):
    """A part of an algorithm with its settings. Components that can replace each other have different ``name``s."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        ignored_types=(str,),  # a formula without settings may be a plain class attribute
    )

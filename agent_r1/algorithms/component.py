"""The parts that algorithms are put together from: frozen data with named kinds."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

Need = Literal["critic", "group", "greedy", "reference", "teacher"]
"""A value model; more than one attempt at each task; a greedy attempt; the policy as it began; another policy."""

Level = Literal["token", "turn", "trajectory"]
"""What is taken together as one."""


class Component(BaseModel):
    """A part of an algorithm, with its numbers. ``kind`` names it among those that could stand in its place."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        ignored_types=(str,),  # a formula without numbers may be a plain text of the class
    )

    kind: ClassVar[str] = ""

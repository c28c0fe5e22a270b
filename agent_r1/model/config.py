"""Settings of LoRA adapters. This module does not import torch, so that the command line starts fast."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

ALL_LINEAR = "all-linear"
"""The value of ``target_modules`` that means all linear layers except the head."""


class LoraConfig(BaseModel):
    """Settings of a LoRA adapter (arXiv:2106.09685), which is trained while all weights of the model are frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    rank: int = Field(default=0, ge=0, le=65536)
    """Rank of the adapter's matrices. 0: no adapter, all weights are trained. An adapter needs about ten times the
    learning rate of full training."""

    alpha: float = Field(default=32.0, gt=0)
    """Strength of the adapter: the product of its matrices is multiplied by alpha / rank."""

    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the linear layers that get an adapter, separated by commas, such as q_proj,v_proj. The name all-linear
    stands for all linear layers except the head."""

    @model_validator(mode="after")
    def _check_rank(self) -> Self:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        if self.rank == 0 and dict(self) != defaults:
            raise ValueError("alpha and target_modules have no effect without an adapter: give rank too")
        return self

"""The settings of an export."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import Status

ExportFormat = Literal["model", "adapter", "trajectories", "openai", "metrics"]

FILTERS = ("split", "first_step", "last_step", "min_reward", "status", "fate")
"""The settings that select trajectories."""


class ExportConfig(BaseModel):
    """Settings of ``agent-r1 export``."""

    section: ClassVar[str] = "Export"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    format: ExportFormat = "model"
    """The format: ``model`` (a Hugging Face folder with a model card), ``adapter`` (LoRA, for peft), ``trajectories``
    (Parquet, for datasets), ``openai`` (messages, tools and rewards as JSON lines), or ``metrics`` (CSV and JSON
    lines)."""

    checkpoint: str = Field(default="best", pattern=r"^(best|last|\d{1,9})$")
    """The weights to export as a model or an adapter: "best" (the best step by validation or, if there was no
    validation, the last step), "last" (the newest checkpoint), or a number (the checkpoint of this step)."""

    split: str | None = None
    """Only trajectories of tasks in this split."""

    first_step: int | None = Field(default=None, ge=0)
    """Only trajectories of this optimizer step and of later steps."""

    last_step: int | None = Field(default=None, ge=0)
    """Only trajectories of this optimizer step and of earlier steps."""

    min_reward: float | None = None
    """Only trajectories whose reward (the weighted sum of all rewards) is at least this number."""

    status: Status | None = None
    """Only trajectories that ended with this status, for example completed."""

    fate: Literal["trained", "dropped", "pending"] | None = None
    """Only trajectories with this fate: ``trained``, ``dropped``, or ``pending`` (not yet trained or dropped)."""

    push: str = ""
    """Repository on the Hugging Face Hub (OWNER/NAME) to which the folder is uploaded. A new repository is private,
    unless --public is given."""

    @field_validator("last_step")
    @classmethod
    def _require_order(cls, value: int | None, info: ValidationInfo) -> int | None:
        first = info.data.get("first_step")
        if value is not None and first is not None and value < first:
            raise ValueError(f"give a last step that is not before the first one, {first}")
        return value

    def check_used(self) -> None:
        """Raise InvalidInput if the user gave a setting that has no effect with the format."""
        is_model = self.format in ("model", "adapter")
        is_metrics = self.format == "metrics"
        filters, checkpoint = (FILTERS if is_model or is_metrics else ()), (() if is_model else ("checkpoint",))
        for name in (*filters, *checkpoint):
            if name in self.model_fields_set:
                do = f"leave it out: it has no effect with --format {self.format}"
                raise InvalidInput(f"--{name}", got=dict(self)[name], do=do)

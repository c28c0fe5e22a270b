"""Settings of the gateway. This module does not import the server."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class GatewayConfig(BaseModel):
    """Settings of the gateway, through which an agent program calls the policy over HTTP (``--agent``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    max_turns: int = Field(default=64, ge=1)
    """Maximum number of answers of the policy per episode. Later requests get HTTP status 403."""

    max_concurrent: int = Field(default=32, ge=1)
    """Maximum number of answers of one episode that are sampled at the same time. Further requests wait."""

    on_error: Literal["retry", "train"] = "retry"
    """What to do if the agent raises an exception after an answer of the policy. retry: make a new attempt, and do
    not train on the failed attempt. train: train on the failed attempt. The final answer of the attempt is then "".
    """

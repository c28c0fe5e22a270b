"""Settings of the gateway. Importing this module does not import a server."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class GatewayConfig(BaseModel):
    """Limits of an agent program: a function of yours that calls the policy over HTTP (``--agent``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    max_turns: int = Field(default=64, ge=1)
    """Maximum number of answers of the policy per episode. Further requests get status 403."""

    max_concurrent: int = Field(default=32, ge=1)
    """Maximum number of answers of one episode that are sampled at the same time. Further requests wait."""

    on_error: Literal["retry", "train"] = "retry"
    """What to do with an attempt whose agent raised an exception after an answer of the policy. retry: the exception
    counts as a failure of the environment, so the attempt is repeated and not trained. train: the exception counts as
    caused by the policy, and the attempt is trained with the answer "".
    """

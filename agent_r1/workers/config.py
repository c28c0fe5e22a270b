"""Settings of the environment workers that a run uses. This module imports no web server."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

TOKEN_VARIABLE = "AGENT_R1_WORKER_TOKEN"
"""The environment variable with the token of the workers. A run never stores the token."""


class EnvironmentConfig(BaseModel):
    """The workers that run the environments of a run.

    Example:
        EnvironmentConfig(workers=("http://10.0.0.5:8200", "http://10.0.0.6:8200"))
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    workers: tuple[str, ...] = ()
    """Environment workers, separated by commas, such as http://10.0.0.5:8200. Start a worker with 'agent-r1 serve-env'.
    Empty: environments and tools run in the process of the run."""

    episodes: int = Field(default=256, ge=1)
    """Maximum number of episodes of one worker at the same time. Further attempts wait. The waiting time counts
    toward the time limit of an attempt, episode_seconds.
    """

    stall_seconds: float = Field(default=60.0, gt=0)
    """Longest time in seconds between two health reports of a worker that has requests. If the next report is later,
    all attempts on the worker fail, and are repeated on another worker. The worker gets no requests until it reports
    its health again.
    """

    @field_validator("workers")
    @classmethod
    def _require_http(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not an address: give one such as http://127.0.0.1:8200")
            if "@" in url:  # a run stores its settings, but must not store credentials
                raise ValueError(f"give addresses without user and password, and the token in {TOKEN_VARIABLE}")
        if len(set(value)) < len(value):
            raise ValueError("a worker is named twice")
        return value

    @field_validator("episodes", "stall_seconds")
    @classmethod
    def _require_workers(cls, value: float, info: ValidationInfo) -> float:
        if info.field_name and value != cls.model_fields[info.field_name].default and not info.data.get("workers"):
            raise ValueError("it has an effect only with environment.workers: give that, or leave it out")
        return value

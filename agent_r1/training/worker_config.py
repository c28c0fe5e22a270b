"""The settings of ``agent-r1 serve-env``. Importing this module does not import torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from agent_r1.training.config import TasksetConfig


class WorkerConfig(TasksetConfig):
    """Settings of an environment worker."""

    section: ClassVar[str] = "Environment worker"

    host: str = "127.0.0.1"
    """Address to listen on. Every address except loopback needs a token."""

    port: int = Field(default=8200, ge=0, le=65535)
    """Port to listen on; 0: any free port."""

    max_episodes: int = Field(default=1024, ge=1)
    """Maximum number of episodes at the same time."""

    idle_seconds: float = Field(default=900.0, gt=0)
    """Seconds without a request after which an episode is closed. Give more than the longest time between two
    actions."""

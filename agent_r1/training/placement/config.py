"""Settings: what starts the processes of a run, and where. Importing this module imports neither torch nor Ray."""

from __future__ import annotations

import ipaddress
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Launcher = Literal["processes", "ray"]
"""What starts the ranks of the trainer and the vLLM servers: the run itself ("processes"), or Ray ("ray")."""

LOOPBACK = "127.0.0.1"


class PlacementConfig(BaseModel):
    """Settings: what starts the ranks and the vLLM servers of a run, and which resources each process gets.

    Example:
        PlacementConfig(launcher="ray", cpus=0.5)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    launcher: Launcher = "processes"
    """What starts the ranks and vLLM servers. processes: the run itself, on this machine. ray: Ray, on the machines of
    a cluster; see docs/scaling.md."""

    address: str = ""
    """Address of a running Ray cluster, such as 10.0.0.5:6379. Empty: the run starts Ray on this machine, and stops it
    at the end."""

    host: str = LOOPBACK
    """Address of this machine in the Ray cluster, such as 10.0.0.5. Ranks connect to the run at this address."""

    cpus: float = Field(default=1.0, gt=0, le=4096)
    """CPU cores that Ray reserves for each rank and each server, such as 0.5."""

    start_seconds: float = Field(default=300.0, gt=0)
    """Time limit in seconds for Ray to reserve the resources, and for the ranks to start."""

    @field_validator("host")
    @classmethod
    def _require_ipv4(cls, value: str) -> str:
        try:
            ipaddress.IPv4Address(value)
        except ValueError:
            raise ValueError("give an IPv4 address, such as 10.0.0.5") from None
        return value

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        changed = [name for name, field in type(self).model_fields.items() if dict(self)[name] != field.default]
        if changed and self.launcher != "ray":
            raise ValueError("these settings have an effect only with placement.launcher ray: give that")
        if self.host != LOOPBACK and not self.address:
            raise ValueError("placement.host needs placement.address: a Ray that the run starts listens on loopback")
        return self

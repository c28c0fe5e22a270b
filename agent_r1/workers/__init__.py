"""Environment workers: processes, often on other machines, in which environments and their tools run.

:class:`EnvironmentWorker` serves environments over HTTP. The episodes of a :class:`RemoteEnv` run on workers.
"""

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_r1.workers.client import RemoteEnv, WorkerError, WorkerPool, check_workers
    from agent_r1.workers.config import EnvironmentConfig
    from agent_r1.workers.protocol import WorkerDescription
    from agent_r1.workers.server import EnvironmentWorker, WorkerLimits

__all__ = [
    "EnvironmentConfig",
    "EnvironmentWorker",
    "RemoteEnv",
    "WorkerDescription",
    "WorkerError",
    "WorkerLimits",
    "WorkerPool",
    "check_workers",
]

__getattr__ = lazy_names(
    __name__,
    {
        "client": ("RemoteEnv", "WorkerError", "WorkerPool", "check_workers"),
        "config": ("EnvironmentConfig",),
        "protocol": ("WorkerDescription",),
        "server": ("EnvironmentWorker", "WorkerLimits"),
    },
)

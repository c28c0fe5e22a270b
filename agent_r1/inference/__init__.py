"""Inference engines: the embedded engine with its KV cache, continuous batching and prefix cache."""

from typing import TYPE_CHECKING

from agent_r1.inference.config import EngineConfig

if TYPE_CHECKING:
    from agent_r1.inference.torch_engine import TorchEngine

__all__ = ["EngineConfig", "TorchEngine"]


def __getattr__(name: str) -> object:
    """Import the engine on first use: it loads torch, which reading settings does not need."""
    if name == "TorchEngine":
        from agent_r1.inference.torch_engine import TorchEngine

        return TorchEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Inference engines: the embedded engine with its KV cache, continuous batching and prefix cache."""

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names
from agent_r1.inference.config import EngineConfig

if TYPE_CHECKING:
    from agent_r1.inference.torch_engine import TorchEngine

__all__ = ["EngineConfig", "TorchEngine"]


# Import the engine on first use, because the engine imports torch and settings do not need torch.
__getattr__ = lazy_names(__name__, {"torch_engine": ("TorchEngine",)})

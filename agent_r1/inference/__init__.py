"""Inference engines: the embedded engine, clients of vLLM and SGLang servers, and guidance by values of a critic."""

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names
from agent_r1.inference.config import DecodeConfig, EngineConfig

if TYPE_CHECKING:
    from agent_r1.inference.torch_engine import TorchEngine
    from agent_r1.inference.value_guided import ValueGuidedEngine

__all__ = ["DecodeConfig", "EngineConfig", "TorchEngine", "ValueGuidedEngine"]


# Import the engines on first use, because TorchEngine imports torch and settings do not need torch.
__getattr__ = lazy_names(__name__, {"torch_engine": ("TorchEngine",), "value_guided": ("ValueGuidedEngine",)})

"""The settings of ``agent-r1 plan``. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from agent_r1.training.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Gpu:
    """The memory of a GPU in GiB, its dense bfloat16 arithmetic in TFLOP/s, and its memory bandwidth in GB/s."""

    memory: float
    tflops: float
    bandwidth: float


GPUS: Mapping[str, Gpu] = {
    "a10g": Gpu(22.5, 70, 600),
    "l40s": Gpu(45, 362, 864),
    "a100-40": Gpu(40, 312, 1555),
    "a100-80": Gpu(80, 312, 2039),
    "h100": Gpu(80, 989, 3350),
    "h200": Gpu(141, 989, 4800),
    "b200": Gpu(180, 2250, 8000),
}

MODEL_SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    name: (kind, dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                           "intermediate_size", "vocab_size", "tie_word_embeddings"), shape, strict=True)))
    for name, (kind, *shape) in {
        "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 4864, 151936, True),
        "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 8960, 151936, True),
        "qwen2.5-3b": ("qwen2", 2048, 36, 16, 2, 11008, 151936, True),
        "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 18944, 152064, False),
        "qwen2.5-14b": ("qwen2", 5120, 48, 40, 8, 13824, 152064, False),
        "qwen2.5-32b": ("qwen2", 5120, 64, 40, 8, 27648, 152064, False),
        "llama-3.1-8b": ("llama", 4096, 32, 32, 8, 14336, 128256, False),
    }.items()
}  # fmt: skip
"""The shapes of known models by name: the architecture in transformers and its settings."""


class PlanConfig(TrainConfig):
    """Settings of ``agent-r1 plan``: the settings of training, and settings that describe hardware and attempts."""

    section: ClassVar[str] = "Plan"

    gpu: str = ""
    """GPU: a10g, l40s, a100-40, a100-80, h100, h200 or b200. Empty: the machine of the recorded run (RUN)."""

    gpus: int = Field(default=1, ge=1, le=65536)
    """Number of GPUs. The trainer uses trainer.ranks GPUs, and the vLLM servers use all others. Without trainer.ranks,
    the fastest division is chosen. 1: engine and trainer share the GPU."""

    gpu_memory: float | None = Field(default=None, gt=0)
    """Memory of a GPU in GiB, if it differs from the data sheet."""

    gpu_tflops: float | None = Field(default=None, gt=0)
    """Dense bfloat16 arithmetic of a GPU in TFLOP/s, if it differs from the data sheet."""

    gpu_bandwidth: float | None = Field(default=None, gt=0)
    """Memory bandwidth of a GPU in GB/s, if it differs from the data sheet."""

    mfu: float = Field(default=0.35, gt=0, le=1)
    """Share of a GPU's arithmetic that training reaches (model FLOPs utilization)."""

    prompt_tokens: int = Field(default=512, ge=1)
    """Number of tokens in the first prompt of an attempt. Not used if a recorded run (RUN) is given."""

    turns: int = Field(default=3, ge=1)
    """Number of actions in an attempt. Not used if a recorded run (RUN) is given."""

    action_tokens: int = Field(default=256, ge=1)
    """Mean number of sampled tokens of an action. Not used if a recorded run (RUN) is given."""

    result_tokens: int = Field(default=256, ge=1)
    """Number of tokens in a tool's result. Not used if a recorded run (RUN) is given."""

    tool_seconds: float | None = Field(default=None, ge=0)
    """Median duration of a turn's tools in seconds. Empty: the durations in the recorded run (RUN), or 0 if no recorded
    run is given."""

    tool_p99: float | None = Field(default=None, ge=0)
    """99th percentile of the duration of a turn's tools in seconds. Empty: every duration is tool_seconds."""

    clock: Literal["wall", "cpu"] = "wall"
    """Clock whose times are read from a recorded run (RUN): wall, or cpu if other programs used the CPU during the
    run."""

    load: float = Field(default=1.0, ge=1)
    """Factor by which other programs slow down all computation, compared with an idle machine."""

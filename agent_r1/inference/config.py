"""Settings of the embedded engine. Imports no torch, so that reading settings stays fast."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.weights import Dtype


class EngineConfig(BaseModel):
    """How many sequences the embedded engine generates at the same time, and how much memory they may take.

    Example:
        EngineConfig(max_sequences=64, kv_cache_gib=8.0)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    dtype: Dtype = "float32"
    """Data type of the engine's weights, activations and KV cache. Log-probabilities are computed in float32."""

    max_sequences: int = Field(default=64, ge=1)
    """Sequences in one decode batch. The engine adds batches of this size while the KV cache has room for them."""

    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Memory for the KV cache, in GiB; sequences that do not fit wait, but one always fits. None: half of the available
    memory on a CPU, at most 4 GiB; 30 % of the free memory on a GPU."""

"""Settings of the embedded engine. Importing this module does not import torch, so that the command line is fast."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.weights import Dtype


class EngineConfig(BaseModel):
    """The size of a decode batch, the data type, and the memory of the KV cache of the embedded engine.

    Example:
        EngineConfig(max_sequences=64, kv_cache_gib=8.0)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    dtype: Dtype = "float32"
    """Data type of the engine's weights, activations and KV cache. Log-probabilities are computed in float32."""

    max_sequences: int = Field(default=64, ge=1)
    """Maximum number of sequences in one decode batch. The engine adds decode batches while the KV cache has room."""

    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Memory for the KV cache, in GiB. Sequences that do not fit wait, but one sequence always runs. None: on a CPU,
    half of the available memory, at most 4 GiB; on a GPU, 30 % of the free memory."""

"""The options and environment variables with which vLLM servers must be started."""

from __future__ import annotations

import shlex

SERVER_OPTIONS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
"""Options of every server: the endpoint for token ids, log-probabilities at the sampling temperature, and no default
sampling parameters from the model's folder."""

SERVER_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pauses and weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # adapters
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of every server. The variable for adapters has no effect without the option --enable-lora."""

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for the option --max-lora-rank."""

NO_ADAPTERS = "--no-enable-lora"
"""An option of vLLM that a user can give. The servers then accept no adapter, and each adapter is merged into the
weights that the servers load."""

KEPT_ADAPTERS = 2
"""The number of adapters that a server keeps: the newest one, and the one before, which older requests still use."""


def adapter_options(rank: int, arguments: str) -> tuple[str, ...]:
    """Return the options with which a server accepts adapters of ``rank``.

    Return () if there is no adapter (rank 0), if vLLM accepts no adapters of this rank, or if the user's ``arguments``
    contain ``NO_ADAPTERS``.

    Example:
        adapter_options(4, "") == ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
    """
    if rank == 0 or rank > ADAPTER_RANKS[-1] or NO_ADAPTERS in shlex.split(arguments):
        return ()
    limit = next(limit for limit in ADAPTER_RANKS if rank <= limit)
    return "--enable-lora", "--max-lora-rank", str(limit), "--max-loras", str(KEPT_ADAPTERS)

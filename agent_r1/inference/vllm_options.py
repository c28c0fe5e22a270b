"""The options and environment variables with which vLLM servers must be started."""

from __future__ import annotations

import shlex

SERVER_OPTIONS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
"""Options of every server. They switch on the endpoint for token ids, return log-probabilities at the sampling
temperature, and ignore the default sampling parameters in the model's folder."""

SERVER_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pauses and weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # adapters
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of every server. The variable for adapters has no effect without the option --enable-lora."""

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for the option --max-lora-rank."""

NO_ADAPTERS = "--no-enable-lora"
"""An option of vLLM. If the user gives this option, the servers do not load adapters. Instead, the adapter is merged
into the weights, and the servers load the merged weights."""

KEPT_ADAPTERS = 2
"""The number of adapters that a server keeps: the newest adapter and the adapter before it, which older requests still
use."""


def adapter_options(rank: int, arguments: str) -> tuple[str, ...]:
    """Return the options with which a vLLM server accepts LoRA adapters of the rank ``rank``.

    ``--max-lora-rank`` is ``rank``, rounded up to one of ``ADAPTER_RANKS``. ``--max-loras`` is ``KEPT_ADAPTERS``.
    Return () if there is no adapter (rank 0), if ``rank`` is larger than all ``ADAPTER_RANKS``, or if the user's
    ``arguments`` contain ``NO_ADAPTERS``.

    Example:
        adapter_options(4, "") == ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
    """
    if rank == 0 or rank > ADAPTER_RANKS[-1] or NO_ADAPTERS in shlex.split(arguments):
        return ()
    limit = next(limit for limit in ADAPTER_RANKS if rank <= limit)
    return "--enable-lora", "--max-lora-rank", str(limit), "--max-loras", str(KEPT_ADAPTERS)

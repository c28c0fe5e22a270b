"""Names of metrics in trackers: GROUP/NAME. A tracker shows each group together."""

from __future__ import annotations

from agent_r1.core.trajectory import Status

ROLLOUT = {
    *(status.value for status in Status),
    *("unscored", "retried", "calls", "invalid_calls", "failed_calls", "groups", "refilled_groups", "failed"),
    *("filtered", "staleness", "tokens", "em"),
}
"""Names of metrics about attempts, without the names of rewards."""


def metric_name(name: str, is_timing: bool = False) -> str:
    """Return the name of a metric in a tracker: ``GROUP/NAME``.

    A name that already contains a slash is returned unchanged.

    Example:
        >>> [metric_name(name) for name in ("reward", "reward/em", "validation_em", "calls", "entropy")]
        ['reward/total', 'reward/em', 'validation/em', 'rollout/calls', 'train/entropy']
        >>> metric_name("update_seconds", is_timing=True)
        'time/update_seconds'
    """
    if "/" in name:
        return name
    if is_timing:
        return f"time/{name}"
    if name == "reward":
        return "reward/total"
    if name.startswith("validation_"):
        return name.replace("_", "/", 1)
    return f"rollout/{name}" if name in ROLLOUT else f"train/{name}"

"""Settings by dotted key, such as ``trainer.learning_rate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.core.redaction import redact_values

FIRST_SETTINGS = ("taskset", "model", "algorithm.name", "steps", "seed")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each setting in nested tables. ``prefix`` is put in front of each key."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def flat_settings(config: Mapping[str, Any]) -> dict[str, str | int | float | bool | None]:
    """Return nested settings by dotted key, for display.

    The most important settings come first, credentials are removed, and a list becomes one text.
    """
    flat = {
        key: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for key, value in flatten(redact_values(config))
    }
    first = {name: flat[name] for name in FIRST_SETTINGS if name in flat}
    return {**first, **flat}

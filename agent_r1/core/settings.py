"""Settings by dotted key, such as ``trainer.learning_rate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.core.redaction import redact_values

FIRST_SETTINGS = ("taskset", "model", "algorithm.name", "steps", "seed")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each setting in nested tables. ``prefix`` is put in front of each key.

    Example:
        >>> dict(flatten({"steps": 20, "trainer": {"learning_rate": 0.001}}))
        {'steps': 20, 'trainer.learning_rate': 0.001}
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def flat_settings(config: Mapping[str, Any]) -> dict[str, str | int | float | bool | None]:
    """Return nested settings by dotted key, for display.

    The most important settings come first, credentials are removed, and a list becomes one text.

    Example:
        >>> flat_settings({"trainer": {"learning_rate": 0.001}, "steps": 20, "splits": ["test", "dev"]})
        {'steps': 20, 'trainer.learning_rate': 0.001, 'splits': 'test, dev'}
    """
    flat = {
        key: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for key, value in flatten(redact_values(config))
    }
    first = {name: flat[name] for name in FIRST_SETTINGS if name in flat}
    return {**first, **flat}

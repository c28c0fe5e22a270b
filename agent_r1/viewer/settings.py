"""The settings that pages show: settings that differ from their defaults or between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.viewer.text import flatten


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: Any
    default: Any = None


@dataclass(frozen=True, slots=True)
class DifferingSetting:
    """A setting that differs between runs. ``values`` has one entry per run; None for a run without the setting."""

    key: str
    values: tuple[Any, ...]


ALGORITHM = "algorithm."
DESCRIPTIVE = frozenset({"algorithm.paper", "algorithm.deviations", "run"})
"""Settings that only describe a run."""


def own_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return the settings of a run that differ from their defaults, except the settings of the algorithm.

    ``defaults`` has the defaults by dotted key. The default of a missing key is None.
    """
    found = []
    for key, value in flatten(config).items():
        default = defaults.get(key)  # None for an entry of a table, such as reward_weights.f1
        if not (key.startswith(ALGORITHM) or key in DESCRIPTIVE or _equal(value, default) or value == {}):
            found.append(Setting(key, value, default))
    return tuple(found)


def algorithm_settings(config: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return the settings of the run's algorithm, without its name and without empty values (0, "", None).

    The keys have no prefix ``algorithm.``.
    """
    # Default values are included, because they depend on the algorithm.
    flat = flatten(config)
    return tuple(
        Setting(key.removeprefix(ALGORITHM), value)
        for key, value in flat.items()
        if key.startswith(ALGORITHM) and key not in {*DESCRIPTIVE, f"{ALGORITHM}name"} and value
    )


def differing_settings(configs: Mapping[str, Mapping[str, Any]]) -> tuple[DifferingSetting, ...]:
    """Return the settings that do not have the same value in all runs. ``configs`` has the settings of each run."""
    flat = [flatten(config) for config in configs.values()]
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in DESCRIPTIVE)
    rows = [DifferingSetting(key, tuple(settings.get(key) for settings in flat)) for key in keys]
    return tuple(row for row in rows if any(not _equal(value, row.values[0]) for value in row.values))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values have the same JSON text: the tuple (1, 2) equals the list [1, 2]."""
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)

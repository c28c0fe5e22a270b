"""Divide films and persons into splits, so that test questions share no fact with training questions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

SHARES: Mapping[str, int] = {"train": 65, "validation": 10, "test": 25}
"""The share of the families that each split gets, in percent. A family is a list of names of films and persons."""


def divide_families(families: Iterable[Sequence[str]]) -> Mapping[str, str]:
    """Return the split ("train", "validation" or "test") of each name in ``families``.

    A family is a list of names of films and persons that must be in the same split, such as a film and its director.
    Families with a common name are merged, such as ("Jaws", "Steven Spielberg") and ("Lincoln", "Steven Spielberg").
    The alphabetically first name ("Jaws") decides the split of a merged family (:func:`class_of`).
    """
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]  # halve the path
            name = parent[name]
        return name

    for first, *others in families:
        for name in (first, *others):
            one, other = sorted((root(first), root(name)))
            parent[other] = one  # the first name in alphabetical order is the root
    return {name: class_of(root(name)) for name in tuple(parent)}


def class_of(name: str) -> str:
    """Return the split ("train", "validation" or "test") of a family.

    A family is a list of names of films and persons. ``name`` is the alphabetically first of these names. A hash of
    ``name`` decides the split, so the split is the same on every machine.
    """
    number = int.from_bytes(hashlib.sha256(f"wikifilm|{name}".encode()).digest()[:8], "big") % 100
    if number < SHARES["train"]:
        return "train"
    return "validation" if number < SHARES["train"] + SHARES["validation"] else "test"

"""Divide films and persons into the splits, so that no fact of a test question is a fact of a training question."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

SHARES: Mapping[str, int] = {"train": 65, "validation": 10, "test": 25}
"""The share of the families in each class, in percent."""


def divide_families(families: Iterable[Sequence[str]]) -> Mapping[str, str]:
    """Return the class of each name: train, validation or test.

    The names of a family are in the same class, and families that share a name are one family: a film, its director,
    other films of the director, the father of the director. The hash of the first name in alphabetical order decides
    the class, so it changes with the corpus only if a new page joins two families.
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
    """Return the class of a family by its first name. The class is the same on every machine."""
    number = int.from_bytes(hashlib.sha256(f"wikifilm|{name}".encode()).digest()[:8], "big") % 100
    if number < SHARES["train"]:
        return "train"
    return "validation" if number < SHARES["train"] + SHARES["validation"] else "test"

"""Divide films and persons into the splits, so that no fact of a test question is a fact of a training question."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

SHARES: Mapping[str, int] = {"train": 65, "validation": 10, "test": 25}
"""The share of the families in each class, in percent."""


def divide_families(families: Iterable[Sequence[str]]) -> Mapping[str, str]:
    """Return the split (train, validation or test) of each name in ``families``.

    All names of a family are in the same split, and families that share a name count as one family. So a film, its
    director, the director's father and the director's other films are in the same split.

    The names of a family are sorted in alphabetical order. A hash of the first of these names decides the split. If the
    corpus gets further pages, the split of a family changes only if another name becomes the first.
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
    """Return the split (train, validation or test) of a family.

    ``name`` is the name of the family that comes first in alphabetical order. A hash of ``name`` decides the split, so
    the split is the same on every machine.
    """
    number = int.from_bytes(hashlib.sha256(f"wikifilm|{name}".encode()).digest()[:8], "big") % 100
    if number < SHARES["train"]:
        return "train"
    return "validation" if number < SHARES["train"] + SHARES["validation"] else "test"

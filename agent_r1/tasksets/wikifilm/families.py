"""Divide films and persons into the splits, so that no fact of a test question is a fact of a training question."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

SHARES: Mapping[str, int] = {"train": 65, "validation": 10, "test": 25}
"""The share of the families that each split gets, in percent. A family is a list of names of films and persons that
must be in the same split."""


def divide_families(families: Iterable[Sequence[str]]) -> Mapping[str, str]:
    """Return the split ("train", "validation" or "test") of each name in ``families``.

    A family is a list of names of films and persons that must be in the same split, such as a film and its director.
    Families that share a name are merged. Families are also merged if a chain of other families connects them. For
    example, the families ("Jaws", "Steven Spielberg") and ("Lincoln", "Steven Spielberg") are merged, so all three
    names are in one split.

    The alphabetically first name of a merged family ("Jaws") decides its split, see :func:`class_of`. If the corpus
    gets further pages, the split changes only if another name becomes the first.
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
    """Return the split ("train", "validation" or "test") of a family: names that must be in the same split.

    ``name`` is the alphabetically first name in the family, after families with a common name were merged (see
    :func:`divide_families`). A hash of ``name`` decides the split, so the split is the same on every machine.
    """
    number = int.from_bytes(hashlib.sha256(f"wikifilm|{name}".encode()).digest()[:8], "big") % 100
    if number < SHARES["train"]:
        return "train"
    return "validation" if number < SHARES["train"] + SHARES["validation"] else "test"

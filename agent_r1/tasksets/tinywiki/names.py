"""The fixed vocabulary of TinyWiki: names of entities and relations."""

from itertools import product

_STARTS = (
    "Al",
    "Br",
    "Cor",
    "Dov",
    "El",
    "Fen",
    "Gar",
    "Hil",
    "Jor",
    "Kest",
    "Lum",
    "Mer",
    "Nor",
    "Ost",
    "Per",
    "Quil",
)
_MIDDLES = ("a", "e", "i", "o", "u")
_ENDS = ("ban", "dra", "mis")

ENTITIES: tuple[str, ...] = tuple("".join(parts) for parts in product(_STARTS, _MIDDLES, _ENDS))

RELATIONS: tuple[str, ...] = (
    "bridge",
    "capital",
    "founder",
    "harbour",
    "mayor",
    "neighbour",
    "painter",
    "river",
    "rival",
    "teacher",
    "temple",
    "twin",
)

UNSEEN_RELATION = "market"
"""A new name for the relation ``REPLACED_RELATION`` ("temple") in some test wikis.

This name occurs in no training text.
"""

REPLACED_RELATION = "temple"

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
"""240 names of one word. Each wiki draws the names of its entities from this tuple."""

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
"""The names of the relations between entities."""

UNSEEN_RELATION = "market"
"""A relation that occurs in no training text. It replaces ``REPLACED_RELATION`` in some test wikis, which test whether
the policy can follow an unknown relation."""

REPLACED_RELATION = "temple"

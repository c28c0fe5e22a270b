"""The fixed vocabulary of TinyWiki: what entities and relations may be called."""

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
"""240 pronounceable names, one word each. Which of them exist, and as what, differs from wiki to wiki."""

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
"""What one entity can be to another."""

UNSEEN_RELATION = "market"
"""In no text that anything is trained on; in some wikis it stands in the place of ``REPLACED_RELATION``."""

REPLACED_RELATION = "temple"

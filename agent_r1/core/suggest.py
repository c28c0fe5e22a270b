"""For an unknown name, suggest the known name that the user probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_CUTOFF = 0.6  # the default of difflib.get_close_matches
_PART_WEIGHT = 0.98  # a match of the last part only ("high" for "loss.high") ranks just below a match of the whole name


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is most similar to ``name``; "" if no known name is similar.

    ``name`` may also be the last part of a dotted name, or the initials of a name of several words.

    Example:
        >>> suggest("serach", ["search", "add"])
        "did you mean 'search'?"
        >>> suggest("lr", ["seed", "trainer.learning_rate"])
        "did you mean 'trainer.learning_rate'?"
        >>> suggest("weather", ["search", "add"])
        ''
    """
    rated = [(_similarity(name, candidate), candidate) for candidate in known]
    similarity, closest = max(rated, key=lambda pair: pair[0], default=(0.0, ""))  # max returns the first of equals
    return f"did you mean {closest!r}?" if similarity >= _CUTOFF else ""


def _similarity(name: str, candidate: str) -> float:
    words = candidate.rpartition(".")[2].split("_")
    part, name_part = "_".join(words), name.rpartition(".")[2]
    by_initials = len(words) > 1 and name_part == "".join(word[:1] for word in words)
    by_part = max(SequenceMatcher(None, part, name_part).ratio(), by_initials)
    return max(SequenceMatcher(None, candidate, name).ratio(), _PART_WEIGHT * by_part)

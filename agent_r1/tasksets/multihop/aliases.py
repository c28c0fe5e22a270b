"""Read alternative names of answers from 2WikiMultihopQA's file ``id_aliases.json``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agent_r1.core.files import read_records

ALIASES_FILE = "id_aliases.json"

_NAMES = TypeAdapter(list[str])


def read_aliases(path: Path, wanted: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the aliases and demonyms of entities by Wikidata id, for the ids in ``wanted``.

    ``path`` is a file with rows such as ``{"Q_id": "Q183", "aliases": ["BRD"], "demonyms": ["German"]}``. If "Q183" is
    in ``wanted``, this row becomes the item ``"Q183": ("BRD", "German")`` of the result. Raises InvalidInput, which
    names the row, if a row cannot be used.
    """
    names: dict[str, tuple[str, ...]] = {}
    for row in read_records(path):
        entity = row.get_text("Q_id")
        if entity in wanted:
            try:
                both = [_NAMES.validate_python(row.values.get(field) or []) for field in ("aliases", "demonyms")]
            except ValidationError as error:
                raise row.error("aliases that are no texts", "give aliases and demonyms as lists of texts") from error
            names[entity] = tuple(name.strip() for some in both for name in some if name.strip())
    return names

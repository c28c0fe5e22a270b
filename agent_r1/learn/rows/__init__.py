"""The algorithms there are, by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from pydantic import ValidationError

from agent_r1.core.errors import InvalidInput
from agent_r1.learn.row import Row, Terms
from agent_r1.learn.rows.actor_critic import PpoTerms
from agent_r1.learn.rows.group_relative import GrpoTerms, RlooTerms
from agent_r1.learn.rows.reinforce import ReinforcePlusPlusTerms

ROWS: Mapping[str, type[Terms]] = {
    "grpo": GrpoTerms,
    "ppo": PpoTerms,
    "reinforce++": ReinforcePlusPlusTerms,
    "rloo": RlooTerms,
}


def build_row(name: str, overrides: Mapping[str, object]) -> Row:
    """The algorithm ``name`` with its terms changed by ``overrides``; InvalidInput where either is not known.

    Example:
        build_row("grpo", {"clip_high": 0.28}).terms.clip_high == 0.28
    """
    if name not in ROWS:
        raise InvalidInput("algorithm", got=name, do=_choose(name, ROWS))
    family = ROWS[name]
    for term in overrides:
        if term not in family.model_fields:
            raise InvalidInput(f"term of {name}", got=term, do=_choose(term, family.model_fields))
    try:
        return family.model_validate(dict(overrides)).row()
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(
            f"{name}.{first['loc'][0]}", got=first["input"], do=f"give another: {first['msg']}"
        ) from error


def _choose(name: str, known: Mapping[str, object]) -> str:
    nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"did you mean {nearest}? there are: {', '.join(sorted(known))}"

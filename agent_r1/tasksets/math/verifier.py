"""Compare an agent's answer with the right answer, using the library math-verify.

Import this module only in a process that can be killed. For some answers, sympy or a regular expression runs forever or
takes all memory.
"""

from __future__ import annotations

import resource
from decimal import Decimal

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Float, MatrixBase, Rational

from agent_r1.tasksets.math.notation import match_shape, normalize_answer, pairs_to_compare, refusal_reason

MEMORY = 4 * 2**30
"""The maximum address space of the process that compares answers, in bytes. Beyond it Python raises MemoryError."""

DIGITS = 6
"""The smallest number of significant digits of a decimal that can equal an irrational number."""

# Units are removed before. math-verify would also remove variables: of "3m" it would leave "3".
_LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True)
)


class Verifier:
    """A verifier that compares answers (LaTeX without dollar signs, or numbers), and limits its process's memory."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def check(self, gold: str, said: str, question: str) -> tuple[bool, str]:
        """Return whether the agent's answer ``said`` is right, and why its form was refused ("" if it was not)."""
        gold, said = _normalize(gold, said)
        refused = refusal_reason(gold, said, question)
        if refused is not None:
            return False, refused
        return any(_are_equal(*pair) for pair in pairs_to_compare(gold, said)), ""

    def is_computable(self, gold: str, said: str) -> bool:
        """Return whether math-verify finds the right answer, in the notation that :meth:`check` gives it, equal to
        itself.
        """
        gold, _ = _normalize(gold, said)
        return _are_equal(gold, gold)


def _normalize(gold: str, said: str) -> tuple[str, str]:
    said = normalize_answer(said)
    return match_shape(normalize_answer(gold), said), said


def _are_equal(gold: str, said: str) -> bool:
    wanted, given = _parsed(gold), _parsed(said)
    exact = [[_exact(value) for value in values] for values in (wanted, given)]
    # math-verify's own time limits are off: after a time-out it returns "not equal" even for a right answer. The result
    # can change if the arguments are swapped. Differences below 10 ** -numeric_precision count as zero.
    if verify(*exact, timeout_seconds=None, numeric_precision=60):
        return True
    return any(_rounds_to(a, b) or _rounds_to(b, a) for a in wanted for b in given)


def _parsed(answer: str) -> list[object]:
    parsed: list[object] = parse(rf"\boxed{{{answer}}}", [_LATEX], parsing_timeout=None)
    return parsed


def _exact(value: object) -> object:
    # math-verify rounds floats to 6 places after the point: to 0, if the number is small.
    if not isinstance(value, Basic | MatrixBase):
        return str(value).replace(" ", "")  # text that math-verify could not parse
    return value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})


def _rounds_to(value: object, decimal: object) -> bool:
    """Return whether ``value`` is irrational, and ``decimal`` is its value in at least DIGITS significant digits."""
    if not isinstance(value, Basic) or not isinstance(decimal, Basic) or not decimal.has(Float):
        return False
    exact = _exact(decimal)
    if not isinstance(exact, Rational) or not value.is_number or value.has(Float) or value.is_Rational:
        return False
    digits = len((Decimal(exact.p) / Decimal(exact.q)).normalize().as_tuple().digits)
    return digits >= DIGITS and value.is_real and Rational(str(value.evalf(digits))) == exact

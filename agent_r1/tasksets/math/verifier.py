"""Compare an agent's answer with the right answer, using the library math-verify.

Import this module only in a process that can be killed. For some answers, sympy or a regular expression runs forever or
takes all memory.
"""

from __future__ import annotations

import re
import resource
from decimal import Decimal
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Float, MatrixBase, Rational

from agent_r1.tasksets.math import notation

MEMORY = 4 * 2**30
"""The maximum address space of the process that compares answers, in bytes. Beyond it Python raises MemoryError."""

DIGITS = 6
"""The smallest number of significant digits of a decimal that can equal a number with infinitely many digits."""

FLOAT_DIGITS, FLOAT_ERROR = 16, Rational(1, 10**14)
"""The digits that Python prints for a result of floating-point arithmetic, and the relative error allowed in it."""

_DECIMAL = re.compile(
    r"\(?(?P<digits>[-+]?(?:\d+\.\d*|\.\d+))\)?(?:(?:\\times|\\cdot)10\^(?P<power>-?\d{1,3}))?(?P<percent>/100)?"
)

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
        if notation.is_text(gold, question):
            return notation.words_of(gold) == notation.words_of(said), ""
        if (refused := notation.refusal_reason(gold, said, question)) is not None:
            return False, refused
        copied = notation.copied_parts(gold, said, question)
        if any(_are_equal(gold, notation.normalize_answer(part)) for part in copied):
            return False, "it contains an expression of the question that is equal to the answer"
        return any(_are_equal(*pair) for pair in notation.pairs_to_compare(gold, said)), ""

    def is_computable(self, gold: str, said: str) -> bool:
        """Return whether math-verify finds the right answer, in the notation that :meth:`check` gives it, equal to
        itself.
        """
        gold, _ = _normalize(gold, said)
        return _are_equal(gold, gold)


def _normalize(gold: str, said: str) -> tuple[str, str]:
    said = notation.normalize_answer(said)
    return notation.match_shape(notation.normalize_answer(gold), said), said


def _are_equal(gold: str, said: str) -> bool:
    wanted, given = (parse(rf"\boxed{{{answer}}}", [_LATEX], parsing_timeout=None) for answer in (gold, said))
    exact = [[_exact(value) for value in values] for values in (wanted, given)]
    # math-verify's own time limits are off: after a time-out it returns "not equal" even for a right answer. The result
    # can change if the arguments are swapped. Differences below 10 ** -numeric_precision count as zero.
    return verify(*exact, timeout_seconds=None, numeric_precision=60) or any(
        _rounds_to(value, text) for values, text in ((wanted, said), (given, gold)) for value in values
    )


def _exact(value: Any) -> Any:
    # math-verify rounds floats to 6 places after the point: to 0, if the number is small.
    if not isinstance(value, Basic | MatrixBase):
        return str(value).replace(" ", "")  # text that math-verify could not parse
    return value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})


def _rounds_to(value: Any, text: str) -> bool:
    """Return whether ``text`` is a decimal that was rounded from ``value``, with enough significant digits."""
    # sympy drops zeros at the end, so the digits are counted in the text.
    found = _DECIMAL.fullmatch(re.sub(r"^[a-z]=|[\s{}]", "", text))
    if found is None or not isinstance(value, Basic) or not value.is_number or not value.is_real:
        return False
    value = _exact(value)
    decimal = Decimal(f"{found['digits']}e{int(found['power'] or 0) - 2 * bool(found['percent'])}")
    _, digits, places = decimal.as_tuple()
    ends = value.is_Rational and pow(10, int(value.q).bit_length(), int(value.q)) == 0
    if value.is_integer or len(digits) < (FLOAT_DIGITS if ends else DIGITS):
        return False
    error = abs(value.evalf(30) - Rational(str(decimal)))
    return bool(error <= max(Rational(10) ** int(places) / 2, FLOAT_ERROR * abs(value).evalf(30)))

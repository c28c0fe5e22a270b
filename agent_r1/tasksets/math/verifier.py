"""The process behind ``scorer``: compares two answers with math-verify.

Only processes that may be killed import this: sympy may take forever, or all memory, on an answer, and so may a
regular expression.
"""

from __future__ import annotations

import resource

from math_verify import parse, verify

from agent_r1.tasksets.math.form import match_shape, refusal_reason
from agent_r1.tasksets.math.normalization import normalize_answer, repeating_decimal

MEMORY = 4 * 2**30
"""Bytes of address space; beyond it a MemoryError is raised."""


class Verifier:
    """Compares answers in a process with limited memory. Answers are bare LaTeX or plain numbers."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def check(self, gold: str, said: str, question: str) -> tuple[bool, str]:
        """Return whether ``said`` is right, and why its form is refused ("" if it is not)."""
        gold, said = _normalize(gold, said)
        refused = refusal_reason(gold, said, question)
        if refused is not None:
            return False, refused
        return _are_equal(repeating_decimal(gold), repeating_decimal(said)), ""

    def is_computable(self, gold: str, said: str) -> bool:
        """Return whether the gold answer, in the form in which it is compared with ``said``, equals itself."""
        gold, _ = _normalize(gold, said)
        return _are_equal(gold, gold)


def _normalize(gold: str, said: str) -> tuple[str, str]:
    said = normalize_answer(said)
    return match_shape(normalize_answer(gold), said), said


def _are_equal(gold: str, said: str) -> bool:
    """Return whether math-verify finds two answers equal. It depends on their order.

    Its own time limits are disabled: they would turn an undecided comparison into a wrong answer.
    """
    return bool(verify(_parsed(gold), _parsed(said), timeout_seconds=None))


def _parsed(answer: str) -> list[object]:
    parsed: list[object] = parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    return parsed

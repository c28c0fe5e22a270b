"""Compare an agent's answer with the right answer, using the library math-verify.

Import this module only in a process that can be killed. For some answers, sympy or a regular expression runs forever or
takes all memory.
"""

from __future__ import annotations

import resource

from math_verify import parse, verify

from agent_r1.tasksets.math.notation import match_shape, normalize_answer, refusal_reason, repeating_decimal

MEMORY = 4 * 2**30
"""The maximum address space of the process that compares answers, in bytes. Beyond it Python raises MemoryError."""


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
        return _are_equal(repeating_decimal(gold), repeating_decimal(said)), ""

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
    # math-verify's own time limits are off: after a time-out it returns "not equal" even for a right answer. The result
    # can change if the arguments are swapped.
    return bool(verify(_parsed(gold), _parsed(said), timeout_seconds=None))


def _parsed(answer: str) -> list[object]:
    parsed: list[object] = parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    return parsed

"""Compare an agent's answer with the right answer, using the library math-verify.

Import this module only in a process that can be killed. For some answers, sympy or a regular expression runs forever or
takes all memory.
"""

from __future__ import annotations

import resource

from math_verify import parse, verify

from agent_r1.tasksets.math.form import match_shape, refusal_reason
from agent_r1.tasksets.math.normalization import normalize_answer, repeating_decimal

MEMORY = 4 * 2**30
"""The maximum memory (address space) of the process that compares answers, in bytes.

If the process needs more, Python raises MemoryError.
"""


class Verifier:
    """A verifier that compares answers, and limits the memory of its process.

    An answer is LaTeX without dollar signs, or a number.
    """

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def check(self, gold: str, said: str, question: str) -> tuple[bool, str]:
        """Return (correct, reason). ``correct`` is true if the answer of the agent equals the right answer.

        ``said`` is the answer of the agent, ``gold`` is the right answer, and ``question`` is the text of the problem.
        An answer such as "2 + 3" for "5" is refused: ``correct`` is false although the values are equal, and ``reason``
        says why. If the answer is not refused, ``reason`` is "".
        """
        gold, said = _normalize(gold, said)
        refused = refusal_reason(gold, said, question)
        if refused is not None:
            return False, refused
        return _are_equal(repeating_decimal(gold), repeating_decimal(said)), ""

    def is_computable(self, gold: str, said: str) -> bool:
        """Rewrite the right answer ``gold``, and return whether math-verify finds the rewritten answer equal to itself.

        The right answer is rewritten in the notation of the agent's answer ``said``, as in :meth:`check`.
        """
        gold, _ = _normalize(gold, said)
        return _are_equal(gold, gold)


def _normalize(gold: str, said: str) -> tuple[str, str]:
    said = normalize_answer(said)
    return match_shape(normalize_answer(gold), said), said


def _are_equal(gold: str, said: str) -> bool:
    """Return whether math-verify finds ``said`` equal to ``gold``. The result can change if the arguments are swapped.

    The time limits of math-verify are off, because after a time-out math-verify returns "not equal" even for a right
    answer.
    """
    return bool(verify(_parsed(gold), _parsed(said), timeout_seconds=None))


def _parsed(answer: str) -> list[object]:
    parsed: list[object] = parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    return parsed

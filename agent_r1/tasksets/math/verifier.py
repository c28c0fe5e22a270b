"""The comparison of two answers with math-verify, in a process of its own.

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
        """Compare ``said`` with the right answer ``gold``. Return (correct, reason).

        ``reason`` is why the form of ``said`` is refused (see the module ``form``), else "".
        """
        gold, said = _normalize(gold, said)
        refused = refusal_reason(gold, said, question)
        if refused is not None:
            return False, refused
        return _are_equal(repeating_decimal(gold), repeating_decimal(said)), ""

    def is_computable(self, gold: str, said: str) -> bool:
        """Return whether math-verify can compute the gold answer, that is, finds the gold answer equal to itself.

        As in :meth:`check`, the gold answer is first written in the notation of the agent's answer ``said``.
        """
        gold, _ = _normalize(gold, said)
        return _are_equal(gold, gold)


def _normalize(gold: str, said: str) -> tuple[str, str]:
    said = normalize_answer(said)
    return match_shape(normalize_answer(gold), said), said


def _are_equal(gold: str, said: str) -> bool:
    """Return whether math-verify finds ``said`` equal to ``gold``. The result can change if the arguments are swapped.

    math-verify's time limits are off: after a time-out, it returns "not equal" even for a right answer.
    """
    return bool(verify(_parsed(gold), _parsed(said), timeout_seconds=None))


def _parsed(answer: str) -> list[object]:
    parsed: list[object] = parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    return parsed

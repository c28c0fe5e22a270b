"""The process behind ``scorer``: compares two answers with math-verify.

Only processes that may be killed import this: sympy may take forever, or all memory, on an answer.
"""

from __future__ import annotations

import resource

from math_verify import parse, verify

MEMORY = 4 * 2**30
"""Bytes of address space; beyond it a MemoryError is raised."""


class Verifier:
    """Compares answers in a process with limited memory."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def same(self, gold: str, said: str) -> bool:
        r"""Return whether ``said`` equals ``gold``, both bare LaTeX or plain numbers. math-verify depends on the
        order.

        Its own time limits are disabled: they would turn an undecided comparison into a wrong answer.
        """
        return bool(verify(_parsed(gold), _parsed(said), timeout_seconds=None))


def _parsed(answer: str) -> list[object]:
    parsed: list[object] = parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    return parsed

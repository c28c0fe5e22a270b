"""The other side of ``scorer``: whether two answers are the same mathematics, by math-verify.

Only processes that may be killed import this: what sympy makes of an answer can take for ever, or all memory.
"""

from __future__ import annotations

import resource

from math_verify import parse, verify

MEMORY = 4 * 2**30
"""Bytes of address space; what needs more raises MemoryError."""


class Verifier:
    """Compares answers, in a process whose memory it limits."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def same(self, gold: str, said: str) -> bool:
        r"""Whether ``said`` is equal to ``gold``, both bare LaTeX or plain numbers. The order matters to math-verify.

        Its own time limits are off: they would call wrong what is not known.
        """
        return bool(verify(_parsed(gold), _parsed(said), timeout_seconds=None))


def _parsed(answer: str) -> list[object]:
    parsed: list[object] = parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    return parsed

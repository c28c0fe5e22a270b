"""TinyWiki questions in wordings that are never trained on; each means the same as a question of the two styles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent_r1.tasksets.tinywiki.wiki import Chain


def who(chain: Chain) -> str:
    """Style a with one word replaced.

    Example:
        "Who is the capital of the mayor of Alba?"
    """
    return f"Who is {_nested(chain)}{chain.start}?"


def command(chain: Chain) -> str:
    """Style a as a request.

    Example:
        "Find the capital of the mayor of Alba."
    """
    return f"Find {_nested(chain)}{chain.start}."


def topic(chain: Chain) -> str:
    """Style a with the entity first.

    Example:
        "Alba: what is the capital of the mayor of it?"
    """
    return f"{chain.start}: what is {_nested(chain)}it?"


def swapped(chain: Chain) -> str:
    """Style b with its sentences in another order.

    Example:
        "Take the mayor, then the capital. Start at Alba. Who is it?"
    """
    return "Take " + ", then ".join(f"the {name}" for name in chain.relations) + f". Start at {chain.start}. Who is it?"


PARAPHRASES: Mapping[str, Callable[[Chain], str]] = {
    "who": who,
    "command": command,
    "topic": topic,
    "swapped": swapped,
}
"""Only words that tiny-base knows, so that the wording is tested and not the vocabulary."""


def _nested(chain: Chain) -> str:
    return "".join(f"the {relation} of " for relation in reversed(chain.relations))

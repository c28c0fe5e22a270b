"""TinyWiki questions in wordings that are not trained on.

The facts of a wiki are drawn at random, whatever the words mean: even a mayor can have a capital. So a question can ask
for "the capital of the mayor of Alba".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent_r1.tasksets.tinywiki.wiki import Chain


def who(chain: Chain) -> str:
    """Return a question that asks for the last value of ``chain``.

    Example:
        "Who is the teacher of the mayor of Alba?"
    """
    return f"Who is {_nested(chain)}{chain.start}?"


def command(chain: Chain) -> str:
    """Return a request for the last value of ``chain``.

    Example:
        "Find the teacher of the mayor of Alba."
    """
    return f"Find {_nested(chain)}{chain.start}."


def topic(chain: Chain) -> str:
    """Return a question that asks for the last value of ``chain``, with the first entity at the front.

    Example:
        "Alba: what is the teacher of the mayor of it?"
    """
    return f"{chain.start}: what is {_nested(chain)}it?"


def swapped(chain: Chain) -> str:
    """Return a question that asks for the last value of ``chain``, with the relations before the first entity.

    Example:
        "Take the mayor, then the teacher. Start at Alba. Who is it?"
    """
    return "Take " + ", then ".join(f"the {name}" for name in chain.relations) + f". Start at {chain.start}. Who is it?"


PARAPHRASES: Mapping[str, Callable[[Chain], str]] = {
    "who": who,
    "command": command,
    "topic": topic,
    "swapped": swapped,
}
"""The functions of this module that write a question, by the name of the wording.

The model tiny-base knows every word of the written questions, so the questions test new wordings and not new words.
"""


def _nested(chain: Chain) -> str:
    return "".join(f"the {relation} of " for relation in reversed(chain.relations))

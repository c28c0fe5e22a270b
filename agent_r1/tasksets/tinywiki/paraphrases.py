"""TinyWiki questions in wordings that are not trained on.

Each question has the same meaning as a question in style a or style b, the wordings of training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent_r1.tasksets.tinywiki.wiki import Chain


def who(chain: Chain) -> str:
    """Return a question for the last value of ``chain``, a chain of facts. The question begins with "Who".

    Example:
        "Who is the capital of the mayor of Alba?" (in training: "What is the capital of the mayor of Alba?")
    """
    return f"Who is {_nested(chain)}{chain.start}?"


def command(chain: Chain) -> str:
    """Return a request for the last value of ``chain``, a chain of facts. Training uses a question instead.

    Example:
        "Find the capital of the mayor of Alba." (in training: "What is the capital of the mayor of Alba?")
    """
    return f"Find {_nested(chain)}{chain.start}."


def topic(chain: Chain) -> str:
    """Return a question for the last value of ``chain``, a chain of facts. The question begins with the first entity.

    Example:
        "Alba: what is the capital of the mayor of it?" (in training: "What is the capital of the mayor of Alba?")
    """
    return f"{chain.start}: what is {_nested(chain)}it?"


def swapped(chain: Chain) -> str:
    """Return a question for the last value of ``chain``, a chain of facts. Two sentences have swapped places.

    Example:
        "Take the mayor, then the capital. Start at Alba. Who is it?"
        (in training: "Start at Alba. Take the mayor, then the capital. Who is it?")
    """
    return "Take " + ", then ".join(f"the {name}" for name in chain.relations) + f". Start at {chain.start}. Who is it?"


PARAPHRASES: Mapping[str, Callable[[Chain], str]] = {
    "who": who,
    "command": command,
    "topic": topic,
    "swapped": swapped,
}
"""The functions that write a question in a wording, by the name of the wording.

The model tiny-base knows all words of these wordings. So the questions test the wording and not the vocabulary.
"""


def _nested(chain: Chain) -> str:
    return "".join(f"the {relation} of " for relation in reversed(chain.relations))

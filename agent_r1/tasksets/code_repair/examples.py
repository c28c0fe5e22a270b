"""The prompt of ``code-repair``: the instruction and two solved tasks, whose functions are in no benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from agent_r1.core.messages import Message
from agent_r1.core.taskset import tool_call
from agent_r1.tasksets.answers import answer

TRY = "try"

WRITING = (
    "One line of a function is wrong. Try the right line: <try>line</try>. "
    "When the test passes, reply with <answer>line</answer>."
)
CHOOSING = (
    "One line of a function is wrong. Try a number of the list: <try>number</try>. If the test fails, try another. "
    "When the test passes, reply with <answer>number</answer>."
)


@dataclass(frozen=True, slots=True)
class SolvedTask:
    """A solved task in the prompt: the agent tries lines until the test passes.

    Attributes:
        text: the request, the test and the function with the wrong line.
        proposals: the lines from which the agent chooses.
        tries: a pair (line, result of the tool) per try. The last line passes the test.
    """

    text: str
    proposals: tuple[str, ...]
    tries: tuple[tuple[str, str], ...]

    def messages(self, choosing: bool) -> tuple[Message, ...]:
        """Return the solved task as a conversation: the request, each call of the tool with its result, the answer.

        If ``choosing`` is True, the request ends with a numbered list of corrected lines of code, and the agent gives a
        number from the list. Otherwise, the agent writes the corrected line.
        """
        menu = "".join(f"\n{index}: {line}" for index, line in enumerate(self.proposals, start=1))
        written = [str(self.proposals.index(line) + 1) if choosing else line for line, _ in self.tries]
        calls = [
            (tool_call(TRY, edit=edit), Message.tool(result, "call_0"))
            for edit, (_, result) in zip(written, self.tries, strict=True)
        ]
        start = Message.user(f"{self.text}\n{menu}" if choosing else self.text)
        return (start, *chain.from_iterable(calls), answer(written[-1]))


PASSED = "1 of 1 examples pass."

_SOLVED = (
    SolvedTask(
        "Find the last digit.\nassert last_digit(57) == 7\n\ndef last_digit(n):\n    n = abs(n)\n    return n // 10",
        ("n = max(n)", "return n % 10", "return n / 10"),
        (
            ("return n / 10", "last_digit(57) should give 7, and gives 5.7\n0 of 1 examples pass."),
            ("return n % 10", PASSED),
        ),
    ),
    SolvedTask(
        "Check if a text has more than n words.\nassert has_words('to be', 1) == True\n\n"
        "def has_words(text, n):\n    return len(text.split()) < n",
        ("return len(text.split()) <= n", "return len(text.split()) == n", "return len(text.split()) > n"),
        (
            (
                "return len(text.split()) <= n",
                "has_words('to be', 1) should give True, and gives False\n0 of 1 examples pass.",
            ),
            ("return len(text.split()) > n", PASSED),
        ),
    ),
)


def examples(choosing: bool) -> tuple[Message, ...]:
    """Return the two solved tasks that each prompt begins with, as messages.

    If ``choosing`` is True, the agent chooses corrected lines of code from a list, and gives their numbers. Otherwise,
    the agent writes the lines.
    """
    return tuple(chain.from_iterable(solved.messages(choosing) for solved in _SOLVED))

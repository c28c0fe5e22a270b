"""Test several versions of functions with the tests of their tasks, and print which tests pass."""

import ast
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any

STEPS = 20_000
"""The largest number of steps of a test. A step is an event of ``sys.settrace``, such as a call or an executed line.

Unlike a time limit, a limit on steps has the same effect on every machine.
"""


class _TooLong(BaseException):
    """Raised if a test runs more than STEPS steps.

    The base class is BaseException, so that an ``except Exception`` in the tested function does not catch the
    exception.
    """


def print_outcomes(functions: list[tuple[str, list[str], list[tuple[str, str]]]]) -> None:
    """Print the outcomes of tests of several functions as JSON: for each function, a list with one text per version.

    The versions of a function are the function itself and its mutations. The text of a version has one letter per test
    (:func:`outcome_of`).

    Args:
        functions: for each function, a tuple (code that runs before it, the sources of its versions, its tests). A test
            is a pair of a call and its expected value.
    """
    outcomes = []
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for given, variants, tests in functions:
            outcomes.append([outcome_of(given, source, tests) for source in variants])
    print(json.dumps(outcomes))


def outcome_of(given: str, source: str, tests: list[tuple[str, str]]) -> str:
    """Return one letter per test: "p" (passes), "f" (fails) or "x" (unusable).

    A test is a pair: the source of a call, and the source of its expected value. A test is unusable if the call runs
    too long, exits, or returns the expected value but this value is not plain data (see :func:`is_plain`). If ``given``
    or ``source`` cannot be executed, all tests are unusable. ``given`` is code that runs before ``source``.
    """
    names: dict[str, Any] = {"__name__": "solution"}
    try:
        for part in (given, source):
            exec(compile(part, "solution.py", "exec", dont_inherit=True), names)
    except BaseException:
        return "x" * len(tests)
    return "".join(letter(call, wanted, names) for call, wanted in tests)


def letter(call: str, wanted: str, names: dict[str, Any]) -> str:
    """Return the outcome of one test as a letter: "p" (passes), "f" (fails) or "x" (unusable; see :func:`outcome_of`).

    ``call`` and ``wanted`` are the source of the call and of its expected value. ``names`` holds the global variables.
    """
    steps = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > STEPS:
            raise _TooLong
        return count

    sys.settrace(count)
    try:
        found = eval(call, names)
        right = bool(found == eval(wanted, names))
    except Exception:
        return "f"
    except BaseException:
        return "x"
    finally:
        sys.settrace(None)
    return ("p" if is_plain(found) else "x") if right else "f"


def is_plain(value: Any) -> bool:
    """Return whether a value is plain data: data that can be sent to a grader in another process and compared there."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except Exception:
        return False

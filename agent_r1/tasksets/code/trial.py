"""A program for the sandbox: run a solution on the examples of its task."""

from __future__ import annotations

import linecache
import traceback

NAME = "solution.py"
LONGEST = 500  # the largest number of characters of a value that are printed


def try_out(given: str, code: str, after: str, examples: list[tuple[str, str]]) -> None:
    """Run a solution and the examples. Print the failures and the number of examples that pass.

    All texts are Python source. First the text ``given`` runs, then the solution ``code``, then the text ``after``. An
    example is a pair (call, expected value).
    """
    linecache.cache[NAME] = (len(code), None, f"{code}\n".splitlines(True), NAME)
    names: dict[str, object] = {"__name__": "solution"}
    try:
        exec(compile(given, "given.py", "exec", dont_inherit=True), names)
        exec(compile(code, NAME, "exec", dont_inherit=True), names)
        exec(compile(after, "after.py", "exec", dont_inherit=True), names)
    except (Exception, SystemExit) as error:
        print(in_full(error))
        return
    failures = [failure for call, wanted in examples if (failure := tried(call, wanted, names))]
    print(*failures, sep="\n", end="\n" if failures else "")
    if examples:
        print(f"{len(examples) - len(failures)} of {len(examples)} examples pass.")
    else:
        print("It runs. The task has no examples to try it on.")


def tried(call: str, wanted: str, names: dict[str, object]) -> str:
    """Return how an example fails, such as "f(1) should give 2, and gives 3"; "" if it passes.

    ``names`` are the global variables of the solution.
    """
    try:
        given = eval(call, names)
        right = bool(given == eval(wanted, names))
    except (Exception, SystemExit) as error:
        return f"{call} should give {wanted}, and raises:\n{in_full(error)}"
    return "" if right else f"{call} should give {wanted}, and gives {given!r:.{LONGEST}}"


def in_full(error: BaseException) -> str:
    """Return an error of the solution with its traceback as text.

    The traceback begins in the code of the solution and shows at most the last 8 frames.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != NAME:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames, limit=-8)).strip()

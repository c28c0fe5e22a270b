"""A trial: runs a solution and the examples of its task, and prints the results for the agent."""

import linecache
import traceback

NAME = "solution.py"
LONGEST = 500  # characters shown of a value


def try_out(given: str, code: str, after: str, examples: list[tuple[str, str]]) -> None:
    """``given`` runs before the solution and ``after`` behind it; examples are pairs of a call and its expected
    value."""
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
    """Return a description of the failure of an example; "" if it passes."""
    try:
        given = eval(call, names)
        right = bool(given == eval(wanted, names))
    except (Exception, SystemExit) as error:
        return f"{call} should give {wanted}, and raises:\n{in_full(error)}"
    return "" if right else f"{call} should give {wanted}, and gives {given!r:.{LONGEST}}"


def in_full(error: BaseException) -> str:
    """Return the traceback from the solution's first line on; a syntax error has none."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != NAME:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames, limit=-8)).strip()

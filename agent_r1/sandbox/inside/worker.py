"""The worker: a process that drops its privileges, runs the programs that it receives, and reports how they end.

    python worker.py CONTROL UID LIMITS        e.g. worker.py 5 2000000001 RLIMIT_AS=536870912,RLIMIT_CORE=0

CONTROL is the file descriptor of a socket. A request is a letter (c: a cell, whose last expression is printed; p: a
whole program), the length of the source in 8 bytes, and the source. A report is a letter (r: ready, o: ok, e: raised,
m: out of memory), the length of a text in 4 bytes, and the text. With the UID "-" the process keeps its user.
"""

# This file imports few modules, because each start of a process includes the imports.
import _ast
import os
import resource
import sys

MAX_ERROR = 8000  # characters


def drop_privileges(uid: str, limits: str) -> None:
    """Set the resource limits and change the user id. Call this function before the process reads untrusted data."""
    for limit in filter(None, limits.split(",")):
        name, _, value = limit.partition("=")
        soft, hard = int(value), resource.getrlimit(resource.__dict__[name])[1]
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.__dict__[name], (soft, soft + (name == "RLIMIT_CPU" and soft != hard)))
    if uid != "-":
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))


def receive(control: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(control, min(size - len(data), 1 << 20))
        if not more:
            os._exit(0)  # the trainer closed the connection
        data += more
    return data


def report(control: int, letter: bytes, text: str = "") -> None:
    data = text[-MAX_ERROR:].encode("utf-8", "replace")
    data = letter + len(data).to_bytes(4, "little") + data
    while data:
        data = data[os.write(control, data) :]


def run_cell(source: str, name: str, names: dict) -> None:
    tree: _ast.Module = compile(source, name, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
    shown = _ast.Interactive([tree.body.pop()]) if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), names)
    if shown is not None:
        exec(compile(shown, name, "single", dont_inherit=True), names)


def run_program(source: str, name: str, names: dict) -> None:
    exec(compile(source, name, "exec", dont_inherit=True), names)


def end_program() -> None:
    """Wait for threads and call the functions registered with ``atexit``, as Python does at the end of a program."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()


def format_error(error: BaseException, source: str, name: str) -> str:
    """Return the traceback of ``error``, without the frames of this file. ``name`` is the program's file name."""
    import linecache
    import traceback

    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def execute(kind: bytes, source: str, name: str, names: dict) -> tuple[bytes, str]:
    """Run source code and return a report: its letter, and the error or "". ``names`` are the global variables."""
    try:
        try:
            run_program(source, name, names) if kind == b"p" else run_cell(source, name, names)
        finally:
            if kind == b"p":
                end_program()
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return b"o", ""
        return b"e", f"SystemExit: {error.code}"
    except MemoryError:
        return b"m", "MemoryError"
    except BaseException as error:
        try:
            return b"e", format_error(error, source, name)
        except BaseException:
            return b"e", type(error).__name__
    return b"o", ""


def flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except BaseException:  # the program has closed, replaced or damaged the stream
            continue


def main() -> None:
    control, uid, limits = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.set_inheritable(control, False)
    drop_privileges(uid, limits)
    module = type(sys)("__main__")
    sys.modules["__main__"], sys.argv = module, ["main.py"]
    report(control, b"r")
    me, count = os.getpid(), 0
    while True:
        kind = receive(control, 1)
        source = receive(control, int.from_bytes(receive(control, 8), "little")).decode("utf-8", "replace")
        count += 1
        name = "main.py" if kind == b"p" else f"<cell {count}>"
        letter, text = execute(kind, source, name, module.__dict__)
        flush()
        if os.getpid() != me:
            os._exit(0)  # this is a child that the program forked, and the child has run to the program's end
        report(control, letter, text)


main()

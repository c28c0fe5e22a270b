"""Programs in the sandbox: whatever they do, the result is a value, in time, and no process is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_r1.sandbox.config import Limits
from agent_r1.sandbox.process import ExecutionResult, ExecutionStatus
from agent_r1.sandbox.sandbox import Interpreter, Sandbox

DOCUMENT = Path(__file__).parents[2] / "docs" / "sandbox.md"
SHORT = Limits(seconds=0.5, memory=2**28, disk=2**20, output=1000)


def run(sandbox: Sandbox, source: str, **options: Any) -> ExecutionResult:
    return asyncio.run(sandbox.run(source, **options))


def test_a_program_reads_its_input_and_prints(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "print(int(input()) * 2)", stdin="21")
    assert (outcome.ok, outcome.stdout.text, outcome.stderr.text, outcome.error) == (True, "42\n", "", "")
    assert "EOFError" in run(sandbox, "input()").error


def test_a_program_is_a_main_program(sandbox: Sandbox) -> None:
    source = """
import atexit, sys, threading, time
def late():
    time.sleep(0.05)
    print("thread")
if __name__ == "__main__":
    atexit.register(print, "exit function")
    threading.Thread(target=late).start()
    print(sys.argv, 7)
"""
    assert run(sandbox, source).stdout.text == "['main.py'] 7\nthread\nexit function\n"


def test_an_error_is_reported_as_a_python_traceback(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "def f():\n    return 1 / 0\nf()")
    assert outcome.status is ExecutionStatus.RAISED
    assert outcome.error.startswith('Traceback (most recent call last):\n  File "main.py", line 3')
    assert "return 1 / 0" in outcome.error
    assert "worker" not in outcome.error


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("pass", ExecutionStatus.OK),
        ("raise SystemExit", ExecutionStatus.OK),
        ("import sys; sys.exit(3)", ExecutionStatus.RAISED),
        ("x = (", ExecutionStatus.RAISED),
        ("\0", ExecutionStatus.RAISED),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", ExecutionStatus.RAISED),
        ("import sys; sys.stdout = None; raise ValueError", ExecutionStatus.RAISED),
        ("f = lambda: f()\nf()", ExecutionStatus.RAISED),
        ("x = []\nwhile True: x.append(' ' * 10**6 + str(len(x)))", ExecutionStatus.OUT_OF_MEMORY),
        ("import os; os._exit(0)", ExecutionStatus.DIED),
        ("import ctypes; ctypes.string_at(0)", ExecutionStatus.DIED),
        ("import os; os.closerange(0, 2**16)", ExecutionStatus.DIED),
        (
            "import os\nfor fd in range(3, 2**16):\n    try: os.write(fd, b'wrong')\n    except OSError: 0",
            ExecutionStatus.DIED,
        ),
    ],
)
def test_each_way_to_end_has_a_status(sandbox: Sandbox, source: str, ended: ExecutionStatus) -> None:
    outcome = run(sandbox, source)
    assert outcome.status is ended
    assert outcome.ok or outcome.error


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import signal, time\nfor s in (1, 2, 3, 10, 12, 13, 14, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(99)",
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(99)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        "(10 ** 10 ** 8) % 7",
    ],
)
def test_a_program_that_hangs_is_stopped_in_time(sandbox: Sandbox, source: str) -> None:
    outcome = run(sandbox, source, limits=SHORT)
    assert (outcome.status, outcome.error) == (ExecutionStatus.TIMED_OUT, "stopped after 0.5 seconds")


def test_cpu_seconds_are_limited(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "while True: pass", limits=Limits(seconds=600, cpu_seconds=1))
    assert (outcome.status, outcome.error) == (ExecutionStatus.TIMED_OUT, "stopped after 1 CPU seconds")


def test_output_is_truncated_and_counted(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "import sys\nprint('x' * 5000, end='')\nsys.stderr.write('y' * 10)")
    assert (outcome.stdout.data, outcome.stdout.dropped) == (b"x" * 1000, 4000)
    assert (outcome.stderr.data, outcome.stderr.dropped) == (b"y" * 10, 0)


def test_a_flood_is_stopped(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "while True: print('x' * 10**6)", limits=Limits(seconds=30, output=1000))
    assert outcome.status is ExecutionStatus.FLOODED
    assert outcome.stdout.data == b"x" * 1000
    assert outcome.stdout.dropped > 2**20


def test_equal_programs_print_equal_sets(sandbox: Sandbox) -> None:
    source = "print({str(i) for i in range(50)})"
    assert run(sandbox, source).stdout == run(sandbox, source).stdout


def test_programs_import_only_from_the_given_packages(sandbox: Sandbox, tmp_path: Any) -> None:
    (tmp_path / "gift.py").write_text("value = 5", "utf-8")
    os.chmod(tmp_path, 0o755)
    config = sandbox.config.model_copy(update={"packages": (tmp_path,)})
    assert run(Sandbox(config), "import gift; print(gift.value)").stdout.text == "5\n"
    assert "ModuleNotFoundError" in run(sandbox, "import gift").error


def test_the_example_in_the_documentation_prints_what_it_says(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    asyncio.run(names["examples"]())
    expected = re.findall(r"print\(.*\)  # (.*)", example)
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line] == expected


def in_one(sandbox: Sandbox, use: Callable[[Interpreter], Awaitable[Any]], limits: Limits | None = None) -> Any:
    """Run ``use`` with an interpreter, and close it."""

    async def within() -> Any:
        interpreter = sandbox.interpreter(limits)
        try:
            return await use(interpreter)
        finally:
            await interpreter.close()

    return asyncio.run(within())


def test_an_interpreter_keeps_its_variables_and_shows_the_last_value(sandbox: Sandbox) -> None:
    async def cells(interpreter: Interpreter) -> list[str]:
        sources = ["x = 6", "x * 7", "print('a'); 'b'", "def f(): return x", "x = 1; f()", "None"]
        return [(await interpreter.run(source)).stdout.text for source in sources]

    assert in_one(sandbox, cells) == ["", "42\n", "a\n'b'\n", "", "1\n", ""]


@pytest.mark.parametrize("lost", ["import time; time.sleep(99)", "import os; os._exit(1)"])
def test_a_lost_interpreter_fails_its_call_and_the_next_result_says_so(sandbox: Sandbox, lost: str) -> None:
    async def cells(interpreter: Interpreter) -> list[ExecutionResult]:
        return [await interpreter.run(source) for source in ("x = 1", lost, "x", "y = 2", "y")]

    first, gone, fresh, _, after = in_one(sandbox, cells, SHORT)
    assert first.ok
    assert not gone.alive
    assert fresh.restarted and "NameError" in fresh.error
    assert (after.restarted, after.stdout.text) == (False, "2\n")


def test_an_error_keeps_the_variables(sandbox: Sandbox) -> None:
    async def cells(interpreter: Interpreter) -> ExecutionResult:
        for source in ("x = 5", "1 / 0", "bytearray(2**30)", "import sys; sys.exit(1)", "import os; os.fork(); 1"):
            await interpreter.run(source)
        return await interpreter.run("x")

    assert "5" in in_one(sandbox, cells).stdout.text.splitlines()  # the forked child may print late


def test_concurrent_calls_run_in_order(sandbox: Sandbox) -> None:
    async def cells(interpreter: Interpreter) -> list[ExecutionResult]:
        first = "import time; time.sleep(0.1); order = ['first']"
        return await asyncio.gather(*map(interpreter.run, (first, "order.append('second')", "order")))

    assert in_one(sandbox, cells)[2].stdout.text == "['first', 'second']\n"


def test_a_cancelled_call_kills_its_process_and_the_next_result_says_so(sandbox: Sandbox) -> None:
    async def cells(interpreter: Interpreter) -> ExecutionResult:
        call = asyncio.create_task(interpreter.run("import time; time.sleep(99)"))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await interpreter.run("1")

    assert in_one(sandbox, cells).restarted


def test_closing_ends_a_running_call(sandbox: Sandbox) -> None:
    async def cells(interpreter: Interpreter) -> tuple[ExecutionResult, ExecutionResult]:
        call = asyncio.create_task(interpreter.run("import time; time.sleep(99)"))
        await asyncio.sleep(0.3)
        await interpreter.close()
        return await call, await interpreter.run("1")

    stopped, after = in_one(sandbox, cells)
    assert (stopped.status, after.status) == (ExecutionStatus.DIED, ExecutionStatus.NOT_STARTED)


def test_no_file_descriptor_is_left_open(sandbox: Sandbox) -> None:
    async def many() -> tuple[int, int]:
        await asyncio.gather(*(sandbox.run("print(1)") for _ in range(3)))
        before = len(os.listdir("/proc/self/fd"))
        await asyncio.gather(*(sandbox.run("while True: print(1)", limits=SHORT) for _ in range(6)))
        return before, len(os.listdir("/proc/self/fd"))

    before, after = asyncio.run(many())
    assert after <= before


def test_a_killed_trainer_leaves_no_process(sandbox: Sandbox) -> None:
    # The programs hold the end of a pipe, which reads as closed once all of them have ended.
    trainer = """
import asyncio, sys
from agent_r1 import Limits, SandboxConfig
from agent_r1.sandbox.isolation import Confinement
from agent_r1.sandbox.process import start_process
from agent_r1.sandbox.sandbox import verify_isolation
async def main():
    confinement = Confinement(verify_isolation(SandboxConfig()), Limits())
    process = await start_process(confinement, descriptors=(int(sys.argv[1]),))
    print("ready", flush=True)
    await process.call("program", "import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(60)")
asyncio.run(main())
"""
    read, write = os.pipe()
    command = [sys.executable, "-c", trainer, str(write)]
    with subprocess.Popen(command, pass_fds=[write], stdout=subprocess.PIPE, encoding="utf-8") as process:
        os.close(write)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    with os.fdopen(read, "rb", buffering=0) as pipe:
        os.set_blocking(read, False)
        assert pipe_is_closed(pipe, within=120.0)


def pipe_is_closed(pipe: Any, within: float) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if pipe.read(1) == b"":
            return True
        time.sleep(0.02)
    return False

"""A program that runs a command, and kills this command when the process that started the program ends.

The starting process holds the other end of the program's standard input. When the starting process ends, even by
SIGKILL, the program reads the end of this input. Then the program kills its own process group, which contains the
command. So no server outlives its run.

If the program itself is killed, the kernel kills the command. This file imports nothing of the package.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group() -> None:
    os.killpg(0, signal.SIGKILL)


def end_with_input() -> None:
    sys.stdin.buffer.read()
    end_group()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)  # SIGTERM ends the command, and then this process ends
    threading.Thread(target=end_with_input, daemon=True).start()
    subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent).wait()
    end_group()  # children of the command can still be running

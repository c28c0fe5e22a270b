"""Runs a command in the process group of this process, which ends with the process that started it.

The starting process holds the other end of standard input. When it ends, also by SIGKILL, this end reads its end of
file, and the whole group is killed. So no server outlives its run. If this process is killed, the kernel kills the
command. This file runs as a program and imports nothing of the package.
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
    signal.signal(signal.SIGTERM, lambda *_: None)  # the command ends on SIGTERM, then this process
    threading.Thread(target=end_with_input, daemon=True).start()
    subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent).wait()
    end_group()  # the command's own children can be left

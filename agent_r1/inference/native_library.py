"""The engine's C++ library: compiled once per machine by the system's compiler, and loaded with ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.cache import build_once

SOURCE = Path(__file__).parent / "native" / "decode_step.cpp"
CACHE = Path("~/.cache/agent-r1/native")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
"""Names of C++ compilers, in the order of the search. The compiler in the environment variable CXX comes first."""

COMPILE_SECONDS = 300.0
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The reason why the native decode step cannot be used, such as "no C++ compiler was found"."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class NativeLibrary:
    """The loaded C++ library, with the name and version of its compiler."""

    functions: ctypes.CDLL
    compiler: str


def find_compiler() -> str | None:
    names = (os.environ.get("CXX", ""), *COMPILERS)
    return next((path for name in names if name and (path := shutil.which(name))), None)


@functools.cache
def load_library(compiler: str | None) -> NativeLibrary | Unavailable:
    """Return the library, compiled by ``compiler``, or the reason why it is not available.

    The library is compiled once for each processor and compiler, also if several processes call this function.
    """
    if compiler is None:
        return Unavailable("no C++ compiler was found: install g++ or clang++, or set CXX")
    try:
        version = _run([compiler, "--version"]).stdout.splitlines()[0]
        origin = {
            "source": hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
            "compiler": f"{compiler}, {version}",
            "flags": " ".join(FLAGS),
            "processor": _processor(),
        }
        name = hashlib.sha256(repr(origin).encode()).hexdigest()[:16]
        folder = build_once(CACHE.expanduser() / name, origin, lambda made: _compile(compiler, made))
        return NativeLibrary(ctypes.CDLL(str(folder / _FILE)), version)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return Unavailable(f"{compiler} failed: {[*lines, error.stderr.strip(), str(error)][0]}")
    except (OSError, RuntimeError, IndexError, subprocess.TimeoutExpired) as error:  # RuntimeError: no home folder
        return Unavailable(f"the library could not be built or loaded: {type(error).__name__}: {error}")


_FILE = "decode_step.so"


def _compile(compiler: str, folder: Path) -> None:
    _run([compiler, *FLAGS, "-o", str(folder / _FILE), str(SOURCE)])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=COMPILE_SECONDS)


def _processor() -> str:
    """Return a text that differs between processors with different instruction sets."""
    if not CPU_INFO.exists():
        return f"{platform.machine()} {platform.processor()}"
    first = CPU_INFO.read_text("utf-8", "replace").split("\n\n")[0]
    lines = [line for line in first.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

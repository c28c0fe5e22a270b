"""Python in separate processes that start at once: each is a fork of a process that has imported torch and run nothing.

A new interpreter takes several seconds of processor time to import torch and transformers.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    ["agent_r1.training.run", "agent_r1.cli", "transformers.models.seed_oss.modeling_seed_oss"]  # that of tiny-base
)


class Program:
    """A running Python program, given as the words after ``python``: ``-c CODE``, ``-m MODULE ..`` or ``FILE ..``."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        outputs = [str(path) for path in (self.stdout, self.stderr)]
        self.stderr.touch()
        self.process = FORKSERVER.Process(target=_run, args=(words, outputs, dict(os.environ)))
        self.process.start()

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end of the program and return its exit code and output."""
        self.process.join()
        assert self.process.exitcode is not None
        return subprocess.CompletedProcess(
            (), self.process.exitcode, self.stdout.read_text("utf-8"), self.stderr.read_text("utf-8")
        )


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the current folder and return its exit code and output. The words are as in ``Program``."""
    with tempfile.TemporaryDirectory() as folder:
        return Program(Path(folder), *words).wait()


def _run(words: tuple[str, ...], outputs: list[str], environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    match words:
        case "-c", code, *rest:
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case "-m", module, *rest:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case file, *rest:
            sys.argv = [file, *rest]
            sys.path.insert(0, file if Path(file).is_dir() else str(Path(file).parent))
            runpy.run_path(file, run_name="__main__")

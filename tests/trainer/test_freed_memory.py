"""The process does not keep the freed memory of passes over batches of different sizes."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from agent_r1.trainer import forward_backward

GROWTH = """
import threading
import torch
from agent_r1.trainer import forward_backward
from agent_r1.trainer.forward_backward import TokenBudget

forward_backward.KEPT = 2**28  # so that the test needs only half a gigabyte

def resident():  # MB
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))

def work(tokens):
    torch.ones(7_500_000)  # a freed tensor of 30 MB, after which glibc keeps freed tensors of up to 30 MB
    freed, kept = [], []
    for size in range(1, 61):  # 1 to 60 times 256 kB, all of them used; small tensors between them stay
        freed.append(torch.ones(size, 65_536))
        kept.append(torch.ones(200))
    return kept

def learn():
    kept.append(TokenBudget(1).run(work, lambda tokens: tokens, lambda: None))

kept = []
thread = threading.Thread(target=learn)
before = resident()
thread.start()
thread.join()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_a_pass_returns_the_memory_of_its_freed_tensors() -> None:
    grown = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, encoding="utf-8", check=True).stdout
    assert float(grown) < 100  # MB; 460 without the return of freed memory


def test_a_process_that_grows_little_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    sizes = iter([2**30, 2**30 + 1, 2**30 + forward_backward.KEPT + 1, 2**30])  # a large process, before its first pass
    monkeypatch.setattr(forward_backward, "_malloc_trim", lambda: trims.append)
    monkeypatch.setattr(forward_backward, "_resident_bytes", lambda: next(sizes))
    memory = forward_backward.FreedMemory()
    memory.give_back()
    assert trims == []
    memory.give_back()
    assert trims == [0]

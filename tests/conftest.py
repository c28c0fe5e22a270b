"""What holds for all tests: one thread, so that tests side by side do not fight over cores; no test is a timing."""

import gc
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so; tests send interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

LONG_FILES = ("test_faults.py", "test_soak.py", "test_examples.py", "test_golden_record.py", "test_resume_controls.py")
"""Files of a few long tests. They start first, so that no worker is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


def pytest_collection_finish() -> None:
    gc.freeze()  # the garbage collector need not look again and again at what was imported and collected


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchao importable. The Makefile installs it in a folder of its own."""
    if find_spec("torchao") is None:
        monkeypatch.syspath_prepend(str(Path(sys.prefix) / "torchao"))
    if find_spec("torchao") is None:
        pytest.skip("torchao is not installed: make install")

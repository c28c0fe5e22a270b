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

LONG_FILES = (
    *("test_resume.py", "test_golden_record.py", "test_run_experiments.py", "test_faults.py", "test_ranks.py"),
    *("test_soak.py", "test_run.py", "test_examples.py", "test_lora.py", "test_shutdown.py"),
    *("test_resume_controls.py", "test_vllm_servers.py", "test_broken_tools.py", "test_cli.py", "test_mcp.py"),
)
"""The files that take longest. They start first, in this order: none is left for one worker at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()  # the garbage collector need not look again and again at what was imported and collected


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("torchao") is None:
        monkeypatch.syspath_prepend(str(Path(sys.prefix) / "torchao"))
    if find_spec("torchao") is None:
        pytest.skip("torchao is not installed: make install")

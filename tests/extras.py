"""Marks for tests that need a package or a program which may be absent.

No condition uses the package's own code, because an error in this code would then skip its own tests.
"""

import os
import shutil
from importlib.util import find_spec

import pytest

CXX = (os.environ.get("CXX", ""), "c++", "g++", "clang++")


def requires(package: str, extra: str) -> pytest.MarkDecorator:
    """Skip the tests of a file if a package is not installed.

    Unlike ``pytest.importorskip``, this does not import the package in every worker that collects the file.
    """
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed (extra {extra})")


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, filter(None, CXX))), reason="no C++ compiler is installed (apt-get install g++)"
)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


needs_gpu = pytest.mark.skipif(not _has_gpu(), reason="torch sees no GPU (make test-gpu)")

"""Marks for tests of packages that may be absent."""

from importlib.util import find_spec

import pytest


def requires(package: str, extra: str) -> pytest.MarkDecorator:
    """Skip the tests of a file if a package is not installed.

    Unlike ``pytest.importorskip``, this does not import the package in every worker that collects the file.
    """
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed (extra {extra})")

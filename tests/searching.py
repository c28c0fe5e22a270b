"""A property is a function of an implementation and an example; hypothesis looks for an example that it does not have.

The same search is run on ours, which must have it, and on a deliberately wrong variant, which must not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.strategies import SearchStrategy

Implementation = TypeVar("Implementation")
Property = Callable[..., None]
"""(implementation, *example) -> None; raises AssertionError where the implementation does not have it."""


class Contradicted(BaseException):
    """Ends a search. Of an Exception, hypothesis would show the example again, which takes a second."""


def holds(claim: Property, implementation: Any, *examples: SearchStrategy[Any], count: int = 50) -> None:
    """No example among ``count`` contradicts the claim. The examples are the same in every run."""
    _search(claim, implementation, examples, count)


def rejected(claim: Property, implementation: Any, *examples: SearchStrategy[Any], count: int = 200) -> None:
    """Some example among ``count`` contradicts the claim."""

    def stop_at_contradiction(implementation: Any, *example: Any) -> None:
        try:
            claim(implementation, *example)
        except AssertionError as error:
            raise Contradicted from error

    with pytest.raises(Contradicted):
        _search(stop_at_contradiction, implementation, examples, count)


def _search(claim: Property, implementation: Any, examples: tuple[SearchStrategy[Any], ...], count: int) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],  # examples are small as they are found; making them smaller takes minutes
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.tuples(*examples))
    def search(example: tuple[Any, ...]) -> None:
        claim(implementation, *example)

    search()

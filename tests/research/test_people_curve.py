"""The curves of people show the mean of the last steps, for each number of hops, and where each stage begins."""

from __future__ import annotations

import pytest

from research.people_curve import WINDOW, draw


def test_a_point_is_the_mean_of_the_attempts_of_the_last_steps() -> None:
    first = [{1: [0.0], 2: [0.0, 0.0]}] * WINDOW
    second = [{1: [1.0], 2: [1.0, 0.0, 1.0]}, {2: [1.0]}]
    axes = draw([first, second]).axes[0]
    one_hop, two_hop = axes.lines[0], axes.lines[1]
    assert list(one_hop.get_xdata()) == [WINDOW, WINDOW + 1, WINDOW + 2]
    assert list(one_hop.get_ydata()) == pytest.approx([0.0, 1 / WINDOW, 1 / (WINDOW - 1)])
    assert list(two_hop.get_ydata()) == pytest.approx([0.0, 2 / (2 * WINDOW + 1), 3 / (2 * WINDOW)])
    assert [line.get_xdata()[0] for line in axes.lines[2:]] == [0, WINDOW]
    assert {text.get_text() for text in axes.texts} == {"1-hop", "2-hop", "stage 1", "stage 2"}

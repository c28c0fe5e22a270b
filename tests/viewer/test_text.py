"""Texts, numbers and charts as pages show them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from agent_r1.viewer.charts import MAX_POINTS, Line, Panel, draw
from agent_r1.viewer.text import duration, number, one_line, shortened, visible

REWARD = Panel("Reward", "", lambda curves: ())
LOGARITHMIC = replace(REWARD, log=True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x00b\x1b[2J\x07", "a⟨U+0000⟩b⟨U+001B⟩[2J⟨U+0007⟩"),
        ("x\u202etxt\u2066\u200b", "x⟨U+202E⟩txt⟨U+2066⟩⟨U+200B⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("a\r\nb\tc\n", "a\nb\tc\n"),
        ("a\rb", "a⟨U+000D⟩b"),
        ("a\U000e0041\U000e007f", "a⟨U+E0041⟩⟨U+E007F⟩"),  # tags
        ("a\ufe01\U000e0100\u180b", "a⟨U+FE01⟩⟨U+E0100⟩⟨U+180B⟩"),  # variation selectors
        ("\u3164\u115f\u1160\uffa0", "⟨U+3164⟩⟨U+115F⟩⟨U+1160⟩⟨U+FFA0⟩"),  # Hangul fillers
        ("\u034f\u2800\u17b4\u2065", "⟨U+034F⟩⟨U+2800⟩⟨U+17B4⟩⟨U+2065⟩"),
        ("\xa0\u3000\u2009\u2028\u2029", "⟨U+00A0⟩⟨U+3000⟩⟨U+2009⟩⟨U+2028⟩⟨U+2029⟩"),
        ("\U0001d173\U000e0fff\u061c\u110bd"[:4], "⟨U+1D173⟩⟨U+E0FFF⟩⟨U+061C⟩\u110b"),
        ("naïve 日本 🙂 नमस्ते e\u0301 \ue000", "naïve 日本 🙂 नमस्ते e\u0301 \ue000"),
    ],
)
def test_every_character_is_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
    visible(text).encode("utf-8")


def test_long_texts_are_shortened_with_the_number_of_characters_left_out() -> None:
    assert shortened("a" * 1_000_000, 10) == "a" * 10 + "\n⟨999,990 more characters⟩"
    assert len(one_line("word " * 1_000_000, 80)) == 80


def test_numbers_and_durations_are_short() -> None:
    assert number(-0.0) == "0"
    shown = [number(value) for value in (0.0, 1.0, -0.25, 12345.6, 1e-9, 1e20, math.nan, -math.inf, None)]
    assert shown == ["0", "1", "-0.25", "12,346", "1e-09", "1e+20", "NaN", "-∞", "\N{EN DASH}"]
    assert [duration(seconds) for seconds in (0.04, 61, 600, 7300, 400_000)] == [
        "40 ms",
        "61 s",
        "10 min",
        "2 h 2 min",
        "4 d 15 h",
    ]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.2, 0.7], ["0.2", "0.4", "0.6", "0.8"]),
        ([0, 0], ["0", "0.25", "0.5", "0.75", "1"]),
        ([5, 5], ["2", "4", "6", "8"]),
        ([-3, 4], ["-4", "-2", "0", "2", "4"]),
        ([1e-9, 2e-9], ["1e-09", "1.25e-09", "1.5e-09", "1.75e-09", "2e-09"]),
        ([10_000, 90_000], ["0", "20,000", "40,000", "60,000", "80,000", "100,000"]),
    ],
)
def test_axes_have_round_numbers_that_enclose_the_curve(values: list[float], ticks: list[str]) -> None:
    chart = draw(REWARD, [Line("a", dict(enumerate(values)), 0)])
    assert [tick.label for tick in chart.y_ticks] == ticks
    assert all(8 <= tick.at <= 186 for tick in chart.y_ticks)


def test_a_logarithmic_axis_has_powers_of_ten_and_leaves_zeros_out() -> None:
    chart = draw(LOGARITHMIC, [Line("a", {1: 0.0, 2: 3e-8, 3: 2e-5}, 0)])
    assert [tick.label for tick in chart.y_ticks] == ["1e-08", "1e-07", "1e-06", "1e-05", "1e-04"]
    assert [value[1] for value in chart.lines[0].values] == [2, 3]
    assert draw(LOGARITHMIC, [Line("a", {1: 0.0}, 0)]).note == ""


def test_a_line_that_covers_others_everywhere_is_dashed() -> None:
    curves = [{1: 0.5, 2: 1.0}, {1: 0.5, 2: 1.0}, {2: 1.0}, {1: 0.5, 2: 0.9}]
    lines = draw(REWARD, [Line(str(index), curve, index) for index, curve in enumerate(curves)]).lines
    assert [line.covered for line in lines] == [0, 1, 2, 0]
    assert [len(line.dots) for line in lines] == [2, 0, 0, 2]


def test_a_long_curve_keeps_its_peaks() -> None:
    curve = {step: math.sin(step / 50) for step in range(10_000)} | {1234: 7.0, 4321: -7.0}
    values = [value for _, _, _, value in draw(REWARD, [Line("a", curve, 0)]).lines[0].values]
    assert len(values) <= MAX_POINTS and max(values) == 7.0 and min(values) == -7.0


def test_values_that_are_not_finite_leave_a_gap_and_no_chart_fails() -> None:
    assert draw(REWARD, [Line("a", {1: math.nan, 2: math.inf}, 0)]).lines == ()
    assert [value[1] for value in draw(REWARD, [Line("a", {1: 1.0, 2: math.nan, 3: 2.0}, 0)]).lines[0].values] == [
        1,
        3,
    ]

"""The comparison of rewards: its table, the settings of its rows, and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.tasksets import build
from research.attempts_to_goal import Curve
from research.sample_efficiency import MODEL, ROWS, Options, Row, config_of, draw, table


def curve(*em: float) -> Curve:
    steps = range(1, len(em) + 1)
    return Curve(em, tuple(10 * step for step in steps), tuple(100 * step for step in steps))


def test_the_table_has_medians_over_seeds_and_counts_the_runs_that_reached_the_goal() -> None:
    fast, slow, never = curve(0.5, 0.5, 0.9), curve(0.1, 0.4, 0.8), curve(0.1, 0.1, 0.3)
    lines = table({"outcome": [fast, fast, fast], "process": [fast, slow, never], "shuffled": [never] * 3}).splitlines()
    assert lines[2] == "| outcome | 3 of 3 | 20 (20-20) | 200 (200-200) | 0.70 (0.70-0.70) |"
    assert lines[3].startswith("| process | 2 of 3 | 30 (20-never) | 300 (200-never) |")
    assert lines[4].startswith("| shuffled | 0 of 3 | never | never |")


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_each_row_has_valid_settings_and_its_own_rewards(row: Row, tmp_path: Path) -> None:
    config = config_of(row, 3, tmp_path / "run", Options(7, 4, str(tmp_path)), build("tinywiki", None, None, 3))
    assert (config.seed, config.steps, config.group_size, config.checkpoint_every) == (3, 7, 4, 0)
    weights = {name: weight for name, weight in config.reward_weights.items() if name not in ("f1", "found") or weight}
    is_proxy = row.name in ("reward model", "reward model shuffled", "log-probability")
    assert (weights.get("em", 1.0) == 0.0) == is_proxy == (config.algorithm.kl is not None)
    assert (str(tmp_path) in config.extra_rewards.values()) == (MODEL in row.settings.values())


def test_the_picture_has_a_curve_and_a_band_for_each_row() -> None:
    axes = draw({"outcome": [curve(0.1, 0.5), curve(0.3, 0.7)], "shuffled": [curve(0.1, 0.1)]}).axes[0]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0.2, 0.6])
    assert list(axes.lines[0].get_xdata()) == [10, 20]
    assert len(axes.collections) == 2
    assert axes.get_legend() is not None

"""The charts of a run and of several runs: which curves share a chart, and with which color."""

from __future__ import annotations

from agent_r1.viewer.charts import NUM_COLORS, draw_comparison, draw_run

PARTS = {f"part {index}": float(index) for index in range(1, 13)}
PROFILED = {
    "reward": {1: 0.5, 2: 0.6},
    **{f"profile/{name}": {1: seconds, 2: seconds} for name, seconds in PARTS.items()},
    **{f"profile_cpu/{name}": {1: seconds} for name, seconds in PARTS.items()},
}
PLAIN = {"reward": {1: 0.4, 2: 0.5}}


def test_the_chart_of_a_profile_has_a_color_for_each_line_and_adds_the_smallest_parts_up() -> None:
    (profile,) = (chart for chart in draw_run(PROFILED) if chart.title == "Profile of a step")
    assert [line.label for line in profile.lines] == [*(f"part {index}" for index in range(6, 13)), "rest"]
    assert profile.lines[-1].last == "15" and len({line.color for line in profile.lines}) == NUM_COLORS


def test_the_trained_and_the_true_reward_share_a_chart_also_if_one_is_constant() -> None:
    curves = {"proxy/reward": {1: 0.1, 2: 0.9}, "proxy/true_reward": {1: 0.0, 2: 0.0}, "proxy/correlation": {2: -0.5}}
    (chart,) = (chart for chart in draw_run(curves) if chart.title == "Trained and true reward")
    assert [line.label for line in chart.lines] == ["reward", "true_reward", "correlation"]


def test_a_comparison_shows_only_parts_that_all_runs_have_and_apart_from_the_other_charts() -> None:
    mixed = {"first": PROFILED, "second": PLAIN}
    assert [chart.title for chart in draw_comparison(mixed)] == ["Reward"]
    assert draw_comparison(mixed, of_parts=True) == ()
    other = {name: curve for name, curve in PROFILED.items() if name != "profile/part 3"}
    both = {"first": PROFILED, "second": other}
    assert [chart.title for chart in draw_comparison(both)] == ["Reward"]
    charts = draw_comparison(both, of_parts=True)
    assert len(charts) == 2 * len(PARTS) - 1 and "Profile of a step: part 3" not in {chart.title for chart in charts}

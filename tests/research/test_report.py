"""Tables, report and picture, from results made by hand."""

import math

import pytest

from agent_r1.cli import parse
from agent_r1.core.errors import InvalidInput
from research.paper.compare import publish
from research.paper.curves import band, draw, panels_of
from research.paper.document import Report, document, markdown
from research.paper.experiments import Curve, Origin, Result, Score
from research.paper.intervals import Estimate
from research.paper.methods import ABLATIONS, METHODS, Figures, Method, by_name
from research.paper.run_experiments import Failure, Outcomes
from research.paper.tables import ablation_table, comparison_table, gather, shown

ORIGIN = Origin("0a1b2c3d", {"python": "3.11.7", "torch": "2.13.0"})
RAG, PPO, GRPO = (by_name(METHODS)[name] for name in ("naive-rag", "ppo", "grpo"))
HALVED = Method("grpo-halved", "GRPO, halved", "train", {}, Figures(0.42, 0.54, 0.14, 0.3667), ablates="grpo")


def result(method, seed, ems, origin=ORIGIN, rewards=(0.2, 0.4)):
    scores = {split: Score(em, 200) for split, em in zip(("near", "far"), ems, strict=True)}
    if method.door == "eval":
        return Result(method.name, seed, f"agent-r1 eval --methods {method.name} --seed {seed}", scores, origin)
    curve = Curve(tuple(enumerate(rewards, 1)), ((2, 0.5 + seed / 10),))
    command = f"agent-r1 train --algorithm {method.settings.get('algorithm', 'grpo')} --seed {seed}"
    return Result(method.name, seed, command, scores, origin, "runs/x", 40.0 + seed, curve)


AVERAGES = [(RAG, (0.2, 0.2, 0.25)), (GRPO, (0.5, 0.6, 0.7)), (HALVED, (0.4, 0.6, 0.5))]


def results():
    """Three seeds of three methods, whose two splits lie 0.1 above and below the average."""
    return [
        result(method, seed, (average + 0.1, average - 0.1))
        for method, averages in AVERAGES
        for seed, average in enumerate(averages)
    ]


def test_table_3_by_hand():
    table = comparison_table([RAG, PPO, GRPO], gather(results(), 3))
    assert table.header[:6] == ("method", "near", "far", "average", "x Naive RAG", "train s")
    rag, ppo, grpo = table.rows
    # mean 0.6, s 0.1, half 4.30265 * 0.1 / sqrt 3; ratios by seed 2.5, 3.0, 2.8: s 0.25166
    ours = ("0.700 ± 0.248", "0.500 ± 0.248", "0.600 ± 0.248", "2.77 ± 0.63", "41")
    assert grpo == ("GRPO", *ours, "0.4405", "0.5741", "0.1485", "0.3877", "2.92")
    assert rag[4:6] == ("1.00 ± 0.00", "-") and rag[-1] == "1.00"
    assert ppo == ("PPO (0 of 3 seeds)", *["-"] * 5, "0.4136", "0.5468", "0.1552", "0.3719", "2.80")


def test_table_4_by_hand():
    full, halved = ablation_table([GRPO, HALVED], gather(results(), 3)).rows
    assert full == ("GRPO", "0.600 ± 0.248", "-", "-", "-", "-", "0.3877", "-")
    paired = ("-0.100 ± 0.248",) * 3  # by seed -0.1, 0, -0.2
    assert halved == ("GRPO, halved", "0.500 ± 0.248", *paired, "no difference", "0.3667", "-0.0210")


def test_differences_are_paired_by_seed_and_not_by_place():
    some = [each for each in results() if (each.method, each.seed) not in {("grpo", 0), ("grpo-halved", 1)}]
    _, halved = ablation_table([GRPO, HALVED], gather(some, 3)).rows
    assert halved[0] == "GRPO, halved (2 of 3 seeds)"
    assert halved[4] == "-0.200", "seed 2 alone has both"
    assert halved[5] == "one seed cannot tell"


def test_a_baseline_that_answers_nothing_has_no_multiple():
    table = comparison_table([GRPO], gather([result(RAG, 0, (0.0, 0.0)), result(GRPO, 0, (0.5, 0.5))], 1))
    assert table.rows[0][4] == "-"


def test_estimates_as_text():
    assert shown(Estimate(0.5, 0.2484, 3)) == "0.500 ± 0.248"
    assert shown(Estimate(0.5, None, 1), digits=2, sign="+") == "+0.50"
    assert shown(None) == "-"


def report(made, failures=()):
    return Report("python -m research.paper --seeds 3", (RAG, GRPO, HALVED), 3, Outcomes(tuple(made), failures), "c.svg")


def test_the_report_says_what_made_it():
    text = document(report(results()))
    assert "    python -m research.paper --seeds 3\n" in text and "![Learning curves](c.svg)" in text
    assert "seeds 0 to 2, on 200 questions per split" in text
    assert "| GRPO | 0.700 ± 0.248 |" in text and "no difference" in text
    assert "Versions: python 3.11.7, torch 2.13.0." in text and "Digest of the code: 0a1b2c3d." in text
    assert "failed" not in text and "changed between" not in text


def test_the_report_admits_failures_and_mixed_code():
    later = [result(GRPO, 3, (0.5, 0.5), Origin("ffffffff", {"python": "3.12.1"}))]
    text = document(report([*results(), *later], (Failure("ppo", 1, "killed by SIGKILL"),)))
    assert "- ppo, seed 1: killed by SIGKILL" in text
    assert "Digest of the code: 0a1b2c3d, ffffffff. It changed between cells" in text and "python 3.12.1" in text


def test_commands_and_tables_of_the_report_hold_together():
    lines = document(report(results())).splitlines()
    commands = [line.split()[1:] for line in lines if line.startswith("    agent-r1 ")]
    assert len(commands) == 3, "two commands of cells, as the ablation shares its own, and that of the report"
    for command in commands:
        parse(command)
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert tables == [12] * 4 + [9] * 4


def test_where_the_report_cannot_go_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInput, match="the cells are kept"):
        publish(report(results()), tmp_path / "file" / "results.md")
    assert publish(report([]), tmp_path / "results.md") == ()
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "of nothing there is no report"


def test_markdown_is_a_table():
    table = comparison_table([], gather(results(), 3))
    assert markdown(table).splitlines()[1] == "|" + "---|" * 11


def test_a_band_by_hand():
    found = band([[(1, 0.2), (2, 0.4)], [(1, 0.4), (2, math.nan)], [(1, 0.9)]])
    assert found.steps == (1, 2)
    assert found.mean == pytest.approx((0.5, 0.4)) and (found.low, found.high) == ((0.2, 0.4), (0.9, 0.4))


def test_what_was_trained_has_a_panel():
    rag_less = panels_of([RAG, GRPO, HALVED, *ABLATIONS], results())
    assert [panel.title for panel in rag_less] == ["GRPO", "GRPO, halved"]
    grpo, halved = rag_less
    assert grpo.full is None and halved.full == grpo.validation
    assert grpo.validation.mean == pytest.approx((0.6,)) and grpo.reward.steps == (1, 2)


def test_the_picture_is_the_same_each_time_and_small():
    made = [result(method, seed, (0.5, 0.5), rewards=[0.5] * 20) for method in METHODS for seed in range(3)]
    picture = draw(METHODS, made)
    assert draw(METHODS, made) == picture and len(picture) < 200_000
    assert b"<!-- REINFORCE++-baseline -->" in picture and b"dc:date" not in picture
    made[-1] = result(METHODS[-1], 2, (0.5, 0.5), rewards=[0.6] * 20)
    assert draw(METHODS, made) != picture, "another reward is another picture"


def test_where_nothing_was_trained_the_picture_is_empty():
    assert b"</svg>" in draw([RAG], [result(RAG, 0, (0.2, 0.2))])

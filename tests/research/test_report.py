"""Tables, report and picture, from results made by hand."""

import math

import pytest

from agent_r1.cli import CONTEXT_SETTINGS, cli
from agent_r1.core.errors import InvalidInput
from research.paper.__main__ import paper
from research.paper.compare import write_report
from research.paper.curves import combine, draw, make_panels
from research.paper.document import Report, make_document, markdown
from research.paper.experiments import Curve, Provenance, Result, Score
from research.paper.intervals import Estimate
from research.paper.methods import ABLATIONS, METHODS, Figures, Method, by_name
from research.paper.run_experiments import Failure, Outcomes
from research.paper.tables import ablation_table, comparison_table, format_estimate, gather

PROVENANCE = Provenance("0a1b2c3d", {"python": "3.11.7", "torch": "2.13.0"})
RAG, PPO, GRPO = (by_name(METHODS)[name] for name in ("naive-rag", "ppo", "grpo"))
HALVED = Method("grpo-halved", "GRPO, halved", "train", {}, Figures(0.42, 0.54, 0.14, 0.3667), ablates="grpo")


def result(method, seed, ems, provenance=PROVENANCE, rewards=(0.2, 0.4)):
    scores = {split: Score(em, 200) for split, em in zip(("near", "far"), ems, strict=True)}
    if method.command == "eval":
        return Result(method.name, seed, f"agent-r1 eval --methods {method.name} --seed {seed}", scores, provenance)
    curve = Curve(tuple(enumerate(rewards, 1)), ((2, 0.5 + seed / 10),))
    command = f"agent-r1 train --algorithm {method.settings.get('algorithm', 'grpo')} --seed {seed}"
    return Result(method.name, seed, command, scores, provenance, "runs/x", 40.0 + seed, curve)


AVERAGES = [(RAG, (0.2, 0.2, 0.25)), (GRPO, (0.5, 0.6, 0.7)), (HALVED, (0.4, 0.6, 0.5))]


def results():
    """Return results of three methods over three seeds; the splits are 0.1 above and below the average."""
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
    paired = ("-0.100 ± 0.248",) * 3  # -0.1, 0 and -0.2 by seed
    assert halved == ("GRPO, halved", "0.500 ± 0.248", *paired, "not resolved", "0.3667", "-0.0210")


def test_differences_are_paired_by_seed_and_not_by_position():
    some = [each for each in results() if (each.method, each.seed) not in {("grpo", 0), ("grpo-halved", 1)}]
    _, halved = ablation_table([GRPO, HALVED], gather(some, 3)).rows
    assert halved[0] == "GRPO, halved (2 of 3 seeds)"
    assert halved[4] == "-0.200", "only seed 2 has both"
    assert halved[5] == "one seed is not enough"


def test_a_baseline_without_a_right_answer_has_no_multiple():
    table = comparison_table([GRPO], gather([result(RAG, 0, (0.0, 0.0)), result(GRPO, 0, (0.5, 0.5))], 1))
    assert table.rows[0][4] == "-"


def test_estimates_as_text():
    assert format_estimate(Estimate(0.5, 0.2484, 3)) == "0.500 ± 0.248"
    assert format_estimate(Estimate(0.5, None, 1), digits=2, sign="+") == "+0.50"
    assert format_estimate(None) == "-"


def make_report(made, failures=()):
    return Report(
        "python -m research.paper --seeds 3", (RAG, GRPO, HALVED), 3, Outcomes(tuple(made), failures), "c.svg"
    )


def test_the_report_names_its_command_versions_and_code():
    text = make_document(make_report(results()))
    assert "    python -m research.paper --seeds 3\n" in text and "![Learning curves](c.svg)" in text
    assert "seeds 0 to 2, on 200 questions per split" in text
    assert "| GRPO | 0.700 ± 0.248 |" in text and "not resolved" in text
    assert "Versions: python 3.11.7, torch 2.13.0." in text and "Hash of the code: 0a1b2c3d." in text
    assert "failed" not in text and "changed between" not in text


def test_the_report_lists_failures_and_mixed_code():
    later = [result(GRPO, 3, (0.5, 0.5), Provenance("ffffffff", {"python": "3.12.1"}))]
    text = make_document(make_report([*results(), *later], (Failure("ppo", 1, "killed by SIGKILL"),)))
    assert "- ppo, seed 1: killed by SIGKILL" in text
    assert "Hash of the code: 0a1b2c3d, ffffffff. It changed between experiments" in text and "python 3.12.1" in text


def test_commands_in_the_report_parse_and_its_tables_are_complete():
    lines = make_document(make_report(results())).splitlines()
    (own,) = (line.split()[3:] for line in lines if line.startswith("    python -m research.paper"))
    paper.make_context("paper", own, **CONTEXT_SETTINGS)
    commands = [line.split()[1:] for line in lines if line.startswith("    agent-r1 ")]
    assert len(commands) == 2, "GRPO and its ablation have the same command here"
    for name, *options in commands:
        cli.commands[name].make_context(name, options, **CONTEXT_SETTINGS)
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert tables == [12] * 4 + [9] * 4


def test_an_unwritable_report_is_an_error_and_no_results_are_no_report(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInput, match="results of the experiments are kept"):
        write_report(make_report(results()), tmp_path / "file" / "results.md")
    assert write_report(make_report([]), tmp_path / "results.md") == ()
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "there is no report without results"


def test_markdown_is_a_table():
    table = comparison_table([], gather(results(), 3))
    assert markdown(table).splitlines()[1] == "|" + "---|" * 11


def test_curves_of_seeds_are_combined_as_computed_by_hand():
    found = combine([[(1, 0.2), (2, 0.4)], [(1, 0.4), (2, math.nan)], [(1, 0.9)]])
    assert found.steps == (1, 2)
    assert found.mean == pytest.approx((0.5, 0.4)) and (found.low, found.high) == ((0.2, 0.4), (0.9, 0.4))


def test_each_trained_method_has_a_panel():
    panels = make_panels([RAG, GRPO, HALVED, *ABLATIONS], results())
    assert [panel.title for panel in panels] == ["GRPO", "GRPO, halved"]
    grpo, halved = panels
    assert grpo.full is None and halved.full == grpo.validation
    assert grpo.validation.mean == pytest.approx((0.6,)) and grpo.reward.steps == (1, 2)


def test_equal_results_give_an_equal_and_small_picture():
    made = [result(method, seed, (0.5, 0.5), rewards=[0.5] * 20) for method in METHODS for seed in range(3)]
    picture = draw(METHODS, made)
    assert draw(METHODS, made) == picture and len(picture) < 200_000
    assert b"<!-- REINFORCE++-baseline -->" in picture and b"dc:date" not in picture
    made[-1] = result(METHODS[-1], 2, (0.5, 0.5), rewards=[0.6] * 20)
    assert draw(METHODS, made) != picture, "another reward gives another picture"


def test_the_picture_is_empty_if_nothing_was_trained():
    assert b"</svg>" in draw([RAG], [result(RAG, 0, (0.2, 0.2))])

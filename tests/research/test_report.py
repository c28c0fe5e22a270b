"""Tables, report and picture, from results made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1.cli import CONTEXT_SETTINGS, cli
from agent_r1.core.errors import InvalidInput
from research.paper.__main__ import paper
from research.paper.experiments import (
    METHODS,
    Base,
    Curve,
    Method,
    Provenance,
    Result,
    Score,
    Training,
    by_name,
    draw,
)
from research.paper.report import (
    Estimate,
    Report,
    Results,
    compare_with,
    counted,
    difference_table,
    efficiency_table,
    exact_match_table,
    format_estimate,
    make_document,
    write_report,
)
from research.paper.run_experiments import Failure, Outcomes

PROVENANCE = Provenance("0a1b2c3d", {"python": "3.11.7", "torch": "2.13.0"}, "AMD EPYC")
RAG, PPO, GRPO = (by_name(METHODS)[name] for name in ("naive-rag", "ppo", "grpo"))
HALVED = Method("grpo-halved", "GRPO halved", {}, 0.3667, ablates="grpo")
BASES = (Base(0, "tiny-base", "aaaaaaaa"), Base(1, "runs/paper/base-1", "bbbbbbbb"))

FAST, LATE, NEVER = (0.5, 0.5, 0.5), (0.1, 0.4, 0.6), (0.1, 0.1, 0.2)


def result(
    method: Method,
    run: tuple[int, int],
    average: float,
    rewards: tuple[float, ...] = NEVER,
    explained: float | None = None,
) -> Result:
    """Return a result whose splits are 0.1 above and below ``average``; sampled exact match is half of the greedy."""
    scores = {
        split: Score(em, em / 2, 100) for split, em in (("near", average + 0.1), ("far", max(average - 0.1, 0.0)))
    }
    base, seed = run
    train = (f"agent-r1 train --algorithm {method.settings.get('algorithm', 'grpo')} --seed {seed}",)
    evaluate = ("agent-r1 eval --methods naive-rag --evaluate_n 100",)
    curve = Curve(rewards, tuple(10 * step for step in range(1, len(rewards) + 1)), (100, 200, 300))
    training = Training("runs/x", curve, 0.02, explained) if method.trains else None
    return Result(method.name, base, seed, (train if method.trains else ()) + evaluate, scores, PROVENANCE, training)


def results() -> list[Result]:
    """Return the results of three methods on two bases, with two seeds of the methods that train."""
    runs = [(base, seed) for base in (0, 1) for seed in (0, 1)]
    return [
        *(result(RAG, (base, 0), 0.2) for base in (0, 1)),
        *(result(GRPO, run, em, FAST) for run, em in zip(runs, (0.5, 0.6, 0.7, 0.6), strict=True)),
        *(
            result(HALVED, run, em, rewards)
            for run, em, rewards in zip(runs, (0.4, 0.4, 0.5, 0.5), (LATE, LATE, NEVER, LATE), strict=True)
        ),
    ]


def gathered(made: list[Result]) -> Results:
    return Results.of_all(made, {"naive-rag": 2, "grpo": 4, "grpo-halved": 4, "ppo": 4})


def test_exact_match_by_hand() -> None:
    table = exact_match_table([RAG, GRPO, PPO], gathered(results()))
    assert table[0][:5] == ("method", "greedy, near", "greedy, far", "greedy, average", "sampled, near")
    _, rag, grpo, ppo = table
    # mean 0.6, s 0.08165, half 3.18245 * 0.08165 / sqrt 4
    greedy = ("0.700 ± 0.130", "0.500 ± 0.130", "0.600 ± 0.130")
    assert grpo == ("GRPO", *greedy, "0.350 ± 0.065", "0.250 ± 0.065", "0.300 ± 0.065", "0.3877")
    assert rag[3] == "0.200 ± 0.000"
    assert ppo == ("PPO (0 of 4 runs)", *["-"] * 6, "0.3719")


def test_attempts_and_tokens_by_hand() -> None:
    table = efficiency_table([GRPO, HALVED, PPO], gathered(results()))
    _, grpo, halved, ppo = table
    assert grpo == ("GRPO", "4 of 4", "20 (20-20)", "200 (200-200)", "20", "20", "0.020 ± 0.000", "-")
    assert halved[1] == "3 of 4" and halved[2] == "30 (30-never)" and halved[4:6] == ("30", "30")
    assert ppo == ("PPO (0 of 4 runs)", *["-"] * 7)


def test_differences_are_paired_by_base_and_seed() -> None:
    shuffled = list(reversed(results()))
    _, halved = difference_table(compare_with([GRPO, HALVED], GRPO, gathered(shuffled)))
    # greedy: -0.1, -0.2, -0.2, -0.1; attempts: 10 each, the last counts with its end
    attempts = ("+10 ± 0", "higher")
    differences = ("-0.075 ± 0.046", "lower", "-0.150 ± 0.092", "lower")
    assert halved == ("GRPO halved", "GRPO", "4", *attempts, *differences, "-0.0210")
    some = [one for one in results() if (one.method, one.base, one.seed) != ("grpo", 0, 0)]
    assert compare_with([HALVED], GRPO, gathered(some))[0].pairs == 3


def test_a_method_without_training_is_paired_by_base() -> None:
    (grpo,) = compare_with([GRPO, PPO], RAG, gathered(results()))
    assert grpo.pairs == 4 and grpo.attempts is None and grpo.greedy.mean == pytest.approx(0.4)
    assert difference_table([grpo])[1][3:5] == ("-", "-")


@pytest.mark.parametrize(("explained", "counts"), [((0.2, 0.5), True), ((0.2, 0.3), False), ((None, None), False)])
def test_a_critic_has_to_explain_enough_on_average(explained: tuple[float | None, ...], counts: bool) -> None:
    made = [result(PPO, (0, seed), 0.5, FAST, value) for seed, value in enumerate(explained)]
    ablation = replace(HALVED, ablates="ppo", critic=True)
    own = [result(ablation, (0, 0), 0.5, FAST, -1.0)]
    found = counted([RAG, PPO, ablation, GRPO], gathered([*results(), *made, *own]))
    assert found == ([RAG, PPO, ablation, GRPO] if counts else [RAG, GRPO]), "an ablation counts with its full method"


def test_estimates_as_text() -> None:
    assert format_estimate(Estimate(0.5, 0.2484, 3)) == "0.500 ± 0.248"
    assert format_estimate(Estimate(0.5, None, 1), digits=2, sign="+") == "+0.50"
    assert format_estimate(Estimate(-1280.0, 2000.4, 3), digits=0, sign="+,") == "-1,280 ± 2,000"
    assert format_estimate(None) == "-"


def make_report(made: list[Result], failures: tuple[Failure, ...] = ()) -> Report:
    command = "python -m research.paper --seeds 2 --bases 2"
    return Report(command, (RAG, GRPO, HALVED), BASES, 2, Outcomes(tuple(made), failures))


def test_the_report_names_its_command_versions_processor_and_code() -> None:
    text = make_document(make_report(results()))
    assert "    python -m research.paper --seeds 2 --bases 2\n" in text and "](learning_curves.svg)" in text
    assert "Versions: python 3.11.7, torch 2.13.0." in text and "Hash of the code: 0a1b2c3d." in text
    assert "Processor: AMD EPYC, one thread." in text and "- Base 1: runs/paper/base-1, weights bbbbbbbb." in text
    assert "Missing" not in text and "changed between" not in text


def test_the_report_lists_failures_missing_runs_and_mixed_code() -> None:
    later = replace(result(GRPO, (1, 1), 0.5), provenance=Provenance("ffffffff", {"python": "3.12.1"}, "AMD EPYC"))
    failures = (Failure("ppo", 1, 0, "killed by SIGKILL"),)
    unused = replace(make_report([*results()[:-1], later], failures), methods=(RAG, PPO, GRPO, HALVED))
    text = make_document(unused)
    assert "- Failed: ppo base 1 seed 0: killed by SIGKILL" in text
    assert "10 of 14 runs were made" in text and "There are no runs of: PPO." in text and "| PPO" not in text
    assert "Hash of the code: 0a1b2c3d, ffffffff. It changed between experiments" in text and "python 3.12.1" in text
    fewer = make_document(make_report(results()[:-1]))
    assert "9 of 10 runs were made" in fewer and "| GRPO halved (3 of 4 runs) |" in fewer


def test_methods_whose_critics_explain_too_little_have_a_section_of_their_own() -> None:
    made = [*results(), result(PPO, (0, 0), 0.9, FAST, 0.1)]
    report = replace(make_report(made), methods=(RAG, PPO, GRPO, HALVED))
    compared, _, apart = make_document(report).partition("## Not compared")
    assert "| PPO" not in compared and "| PPO (1 of 4 runs) |" in apart


def test_commands_in_the_report_parse_and_its_tables_are_complete() -> None:
    lines = make_document(make_report(results())).splitlines()
    (own,) = (line.split()[3:] for line in lines if line.startswith("    python -m research.paper"))
    paper.make_context("paper", own, **CONTEXT_SETTINGS)
    commands = [line.split()[1:] for line in lines if line.startswith("    agent-r1 ")]
    assert len(commands) == 5, "one of naive RAG, two of each method that trains"
    for name, *options in commands:
        cli.commands[name].make_context(name, options, **CONTEXT_SETTINGS)
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert tables == [9] * 7 + [11] * 3 + [9] * 8 + [11] * 3


def test_an_unwritable_report_is_an_error_and_no_results_are_no_report(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")
    with pytest.raises(InvalidInput, match="results of the experiments are kept"):
        write_report(make_report(results()), tmp_path / "file" / "results.md")
    assert write_report(make_report([]), tmp_path / "results.md") == ()
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "there is no report without results"


def test_equal_results_give_an_equal_and_small_picture() -> None:
    made = [result(method, (0, seed), 0.5, (0.5,) * 3) for method in METHODS for seed in range(3)]
    picture = draw(METHODS, made)
    assert draw(METHODS, made) == picture and len(picture) < 200_000
    assert b"<!-- REINFORCE++-baseline -->" in picture and b"dc:date" not in picture
    made[-1] = result(METHODS[-1], (0, 2), 0.5, (0.6,) * 3)
    assert draw(METHODS, made) != picture, "another curve gives another picture"


def test_the_picture_is_empty_if_nothing_was_trained() -> None:
    assert b"</svg>" in draw([RAG], [result(RAG, (0, 0), 0.2)])

"""Comparison with the gold answer: equal mathematics in any notation, computed, and of the same kind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from extras import requires

from agent_r1.core.task import Task
from agent_r1.tasksets.math import copied_expressions, plus_one, solutions_of
from agent_r1.tasksets.math.problems import Problem
from agent_r1.tasksets.math.scorer import AnswerChecker, Checked

pytestmark = requires("math_verify", "math")


@pytest.fixture(scope="module")
def checker() -> AnswerChecker:
    return AnswerChecker(20.0)


def verdicts(
    checker: AnswerChecker, pairs: list[tuple[str, str]], question: str = ""
) -> dict[tuple[str, str], Checked]:
    async def all_of() -> dict[tuple[str, str], Checked]:
        return {pair: await checker.check(*pair, question) for pair in pairs}

    return asyncio.run(all_of())


ACCEPTED = {
    "18": [
        "18 dollars",
        "18 eggs",
        "18 miles per hour",
        "18 km/h",
        "18.",
        "18,",
        "18;",
        "£18",
        "€18",
        "$18",
        "18 USD",
        r"18\text{ eggs}",
    ],
    "18.0": ["= 18", "18.00", "\uff11\uff18", "x = 18", r"\$18", "18 years old"],
    "5": ["5 cm^2", r"5\ \mathrm{cm}^2", "5%", r"5^\circ", "(5)"],
    "1000": [r"1\,000", r"1\ 000", "1 000", "1,000", "1e3", r"1\times10^3", "1{,}000"],
    r"10,\!080": ["10080", r"10\,080"],
    "1,234,567": [r"1,234,567 \text{ people}"],
    "3/2": ["1 1/2", r"1\frac{1}{2}", "1.5", r"\frac32"],
    r"\frac{1}{3}": [r"0.\overline{3}", "1/3"],
    r"(-\infty,2)": ["x<2", "2 > x"],
    "[1,2]": [r"1\le x\le 2", r"x \in [1,2]"],
    r"(-\infty,2)\cup(3,\infty)": [r"x<2 \text{ or } x>3"],
    r"\frac{\sqrt{3}}{2}": ["√3/2"],
    r"\begin{pmatrix}1\\2\end{pmatrix}": ["(1,2)"],
    r"\{1,2\}": ["1,2", "2,1"],
    "1,2": [r"1 \text{ and } 2", "x=1,x=2", "2, 1", "2 or 1"],
    "52_8": ["52_{8}"],
    "11\\sqrt2": [r"11\sqrt{2}"],
    "1024": ["1024"],
    "2^{10}": ["1024"],
    "x^2+2x+1": ["(x+1)^2"],
    "(15,-29)": ["(15, -29)"],
    "-13x+3": ["3-13x"],
    r"1 \pm \sqrt{19}": [r"1\pm\sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"],
    "2+3i": ["3i+2"],
}
REFUSED = {
    "52_8": ["52", "52_9", "42"],
    "52": ["52_8"],
    "(1,2)": [r"\{1,2\}", "1,2", "(2,1)", "[1,2]"],
    "5": ["4=5", "x=4=5", "[5,5]", r"\{5\}", "4+1", r"\max(5,4)", "|5|", r"\sqrt{25}", r"\log_2 32", r"10-5", "5 or 6"],
    "18": [r"6\cdot 3", "6*3", "18 million", "18 hundred", "17", "18, 17", r"\frac{1}{2}\cdot 36", "18 or 17"],
    "12": [r"\sum_{i=3}^{5} i"],
    "7": [r"\gcd(14,21)", "gcd(14, 21)"],
    "120": ["5!", r"\binom{10}{3}", r"\prod_{i=1}^{5} i"],
    "1": [r"\lim_{x\to0}\frac{\sin x}{x}", "1^{2^{3}}", "9^{9^{9^9}}", "10000000!", r"\int_0^1 1 dx"],
    "9901": ["99^2+99+1"],
    "6": [r"\log_2 64"],
    r"\text{(C)}": ["(B)"],
}


@pytest.mark.parametrize("gold", ACCEPTED)
def test_equal_mathematics_is_accepted_in_common_notations(gold: str, checker: AnswerChecker) -> None:
    found = verdicts(checker, [(gold, answer) for answer in ACCEPTED[gold]])
    assert {pair: each for pair, each in found.items() if each.correct is not True} == {}


@pytest.mark.parametrize("gold", REFUSED)
def test_an_uncomputed_answer_or_another_kind_of_object_is_wrong(gold: str, checker: AnswerChecker) -> None:
    found = verdicts(checker, [(gold, answer) for answer in REFUSED[gold]])
    assert {pair: each for pair, each in found.items() if each.correct is not False} == {}


PAIRS = Path(__file__).parent / "math_pairs.tsv"
"""Pairs (verdict, family, gold answer, answer), judged by hand."""


@pytest.mark.parametrize("verdict", ["equal", "different"])
def test_pairs_of_answers_are_equal_as_a_reader_would_judge(verdict: str, checker: AnswerChecker) -> None:
    rows = [line.split("\t") for line in PAIRS.read_text("utf-8").splitlines()[1:]]
    pairs = [(gold, said) for judged, _, gold, said in rows if judged == verdict]
    assert len(pairs) >= 150
    found = verdicts(checker, pairs)
    assert {pair: each for pair, each in found.items() if each.correct is not (verdict == "equal")} == {}


@pytest.mark.parametrize(
    ("question", "gold", "copied"),
    [
        (r"Write $\sqrt{242}$ in simplest form.", r"11\sqrt2", r"\sqrt{242}"),
        (r"Write $\sqrt{242}$ in simplest form.", r"11\sqrt2", r"\sqrt{242}+0"),
        (r"Write $\sqrt{242}$ in simplest form.", r"11\sqrt2", r"\frac{3\sqrt{242}}{3}"),
        (r"Add $\sqrt{50}$ and $\sqrt8$.", r"7\sqrt{2}", r"\sqrt{50}+\sqrt8"),
        (r"Factor $ab+5b+2a+10$.", "(a+5)(b+2)", "ab+5b+2a+10+0"),
        (r"Factor $ab+5b+2a+10$.", "(a+5)(b+2)", "ab+5b+2a+10"),
        (r"Simplify \[(-k + 4) + (-2 + 3k).\]", "2k+2", "(-k+4)+(-2+3k)"),
        (r"Write $\frac{3}{20}$ as a decimal.", "0.15", r"\frac{3}{20}"),
        (r"Write $0.\overline{4}$ as a fraction.", r"\frac{4}{9}", r"0.\overline{4}"),
    ],
)
def test_an_expression_copied_from_the_question_is_wrong(
    question: str, gold: str, copied: str, checker: AnswerChecker
) -> None:
    assert verdicts(checker, [(gold, copied)], question)[gold, copied].correct is False
    assert verdicts(checker, [(gold, gold)], question)[gold, gold].correct is True
    # Control: without the question it counts as equal mathematics.
    free = verdicts(checker, [(gold, copied)], "")[gold, copied]
    assert free.correct is True or "worked out" in free.reason
    assert copied_expressions(question, gold) != ()


def test_the_gold_answer_may_occur_in_the_question(checker: AnswerChecker) -> None:
    assert verdicts(checker, [("5", "5.0"), ("5", "x=5")], "Which of $5$ and $6$ is odd?")["5", "5.0"].correct is True
    assert copied_expressions("Which of $5$ and $6$ is odd?", "5") == ("6",)


def test_an_expression_of_the_question_that_the_gold_answer_contains_may_be_used(checker: AnswerChecker) -> None:
    pair = r"\frac{3\sqrt{3}}{4}", r"0.75\sqrt{3}"
    assert verdicts(checker, [pair], r"The side is $\sqrt{3}$.")[pair].correct is True


def test_letters_are_a_product_only_if_the_question_names_them_as_variables(checker: AnswerChecker) -> None:
    question = "A rectangle has the sides $a$ and $b$."
    assert verdicts(checker, [("ab", "ba")], question)["ab", "ba"].correct is True
    assert verdicts(checker, [("ab", "ba")])["ab", "ba"].correct is False
    wrapped = r"\text{ab}", "ba"
    assert verdicts(checker, [wrapped], question)[wrapped].correct is False


def test_infinity_plus_one_is_infinity() -> None:
    assert plus_one(r"-\infty") == ()
    task: Task = Problem("a", "The limit of $x$?", r"\infty").task("test")
    assert "one more" not in {each.name for each in solutions_of((), 5)(task).wrong}

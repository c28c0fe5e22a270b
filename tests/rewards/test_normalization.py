"""Answers are extracted, normalized and compared as in the benchmarks."""

from __future__ import annotations

import string
import sys
import unicodedata
from fractions import Fraction
from pathlib import Path

import pytest
import regex
from hypothesis import given, strategies as st

from agent_r1.core.text import fold
from agent_r1.rewards.scoring import (
    benchmark_normalize,
    exact_match_score,
    extract_answer,
    f1_score,
    normalize,
    sub_match_score,
)

words = st.sampled_from(
    ["a", "an", "the", "yes", "no", "noanswer", "alba", "Bruno", "rules", "The", "king's", "-", "3.5"]
)
phrases = st.lists(words, max_size=5).map(" ".join)
anything = phrases | st.text(max_size=20)
golds = st.lists(anything, min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>Rome</answer>", "Rome"),
        ("so <answer> the\nEternal City </answer>.", "the\nEternal City"),
        ("<answer>Rome</answer> or rather <answer>Oslo</answer>", "Oslo"),
        ("<answer>Rome</answer> or <answer>Os", "Rome"),
        ("<answer><answer>Rome</answer>", "Rome"),
        ("<answer>a < b</answer>", "a < b"),
        ("Rome", None),
        ("", None),
        ("<answer></answer>", None),
        ("<answer>Rome</answer> or <answer> </answer>", None),
        ("<answer>Rome", None),
        ("</answer>Rome<answer>", None),
        ("<Answer>Rome</Answer>", None),
    ],
)
def test_the_last_complete_answer_counts(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_extracting_an_answer_takes_linear_time() -> None:
    assert extract_answer("<answer>" * 200_000) is None


def reference_normalize(text: str) -> str:
    """Apply the same rule one character and one word at a time."""
    kept = [character for character in text.lower() if character not in string.punctuation]
    return " ".join(word for word in "".join(kept).split() if word not in ("a", "an", "the"))


@given(phrases | st.text(string.ascii_letters + string.digits + string.punctuation + " \t\n", max_size=30))
def test_the_rule_of_the_benchmarks_is_applied_word_by_word(text: str) -> None:
    assert benchmark_normalize(text) == reference_normalize(text)


PAIRS = Path(__file__).parent / "answer_pairs.tsv"
"""Pairs (verdict, family, gold answer, answer), judged by hand. Characters can be written as in Python: \\u200b."""


def read_pairs() -> list[tuple[str, str, str]]:
    lines = (line.encode("latin-1", "backslashreplace") for line in PAIRS.read_text("utf-8").splitlines()[1:])
    rows = [line.decode("unicode_escape").split("\t") for line in lines]
    return [(verdict, gold, answer) for verdict, _, gold, answer in rows]


def test_answers_are_equal_as_a_reader_would_judge() -> None:
    pairs = read_pairs()
    assert [pair for pair in pairs if (exact_match_score(pair[2], [pair[1]]) == 1.0) != (pair[0] == "equal")] == []
    assert [pair for pair in pairs if (f1_score(pair[2], [pair[1]]) == 1.0) != (pair[0] == "equal")] == []
    assert {verdict for verdict, *_ in pairs} == {"equal", "different"} and len(pairs) > 100
    # Control: the rule of the benchmarks disagrees.
    assert any(
        benchmark_normalize(gold) == benchmark_normalize(said) for verdict, gold, said in pairs if verdict[0] == "d"
    )


def test_invisible_characters_are_those_that_unicode_says_are_ignored() -> None:
    characters = map(chr, range(sys.maxunicode + 1))
    hidden = [character for character in characters if not fold(character)]
    assert hidden == regex.findall(r"\p{Default_Ignorable_Code_Point}", "".join(map(chr, range(sys.maxunicode + 1))))


@given(phrases | st.text(max_size=20))
def test_normalization_ignores_case_and_composition_and_leaves_no_text_empty(text: str) -> None:
    assert normalize(unicodedata.normalize("NFD", text)) == normalize(unicodedata.normalize("NFC", text))
    assert bool(normalize(text)) or not fold(text).strip()


@given(st.text(string.ascii_letters + " .,!?", max_size=30))
def test_words_are_compared_as_in_the_benchmarks(text: str) -> None:
    # apart from articles before punctuation or at the end, an "a" inside, and texts of which nothing is left
    words = [word for word in text.split() if benchmark_normalize(word)]
    assert normalize(f"{' '.join(words)} end") == benchmark_normalize(f"{' '.join(words)} end")


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1", "sub"),
    [
        ("Bruno", ["Bruno"], 1, 1, 1),
        ("the BRUNO!", ["Bruno"], 1, 1, 1),
        ("Bruno I", ["Bruno"], 0, Fraction(2, 3), 1),
        ("Bruno", ["Bruno I"], 0, Fraction(2, 3), 0),
        ("Bruno", ["Carla", "Bruno"], 1, 1, 1),
        ("New York City", ["New York", "NYC"], 0, Fraction(4, 5), 1),
        ("new new york", ["new york"], 0, Fraction(4, 5), 1),
        ("Carla", ["Bruno"], 0, 0, 0),
        ("", ["Bruno"], 0, 0, 0),
        ("yes", ["yes"], 1, 1, 1),
        ("yes they are", ["yes"], 0, 0, 1),
        ("yes", ["yes they are"], 0, 0, 0),
        ("no", ["yes"], 0, 0, 0),
        ("unknown", ["no"], 0, 0, 0),
        ("the", ["A"], 0, 0, 0),
        ("!!!", ["A"], 0, 0, 0),
        ("Bruno", ["the"], 0, 0, 0),
        ("It is C++.", ["C"], 0, 0, 0),
        ("It is C++.", ["C++"], 0, 0.5, 1),
        ("It is -1.5 today", ["-1.5"], 0, 0.4, 1),
        ("1,000", ["1000"], 1, 1, 1),
    ],
)
def test_known_cases(prediction: str, answers: list[str], exact: float, f1: float, sub: float) -> None:
    scores = (
        exact_match_score(prediction, answers),
        f1_score(prediction, answers),
        sub_match_score(prediction, answers),
    )
    assert scores == (exact, pytest.approx(float(f1)), sub)


def reference_f1(prediction: str, answer: str) -> Fraction:
    """Compute the word overlap by crossing words out, in exact arithmetic."""
    predicted, gold = reference_normalize(prediction).split(), reference_normalize(answer).split()
    if predicted == gold:
        return Fraction(1)
    if any(side in (["yes"], ["no"], ["noanswer"]) for side in (predicted, gold)):
        return Fraction(0)
    left, common = list(gold), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        return Fraction(0)
    precision, recall = Fraction(common, len(predicted)), Fraction(common, len(gold))
    return 2 * precision * recall / (precision + recall)


@given(phrases, st.lists(phrases, min_size=1, max_size=4))
def test_f1_equals_its_definition(prediction: str, answers: list[str]) -> None:
    best = float(max(reference_f1(prediction, one) for one in answers))
    assert f1_score(prediction, answers, benchmark_normalize) == pytest.approx(best)


@given(anything, golds, anything)
def test_more_gold_answers_never_lower_a_score_and_order_is_irrelevant(
    prediction: str, answers: list[str], more: str
) -> None:
    for score in (exact_match_score, f1_score, sub_match_score):
        assert score(prediction, [*answers, more]) >= score(prediction, answers)
        assert score(prediction, answers[::-1]) == score(prediction, answers)
        assert score(more, [*answers, more]) == 1.0

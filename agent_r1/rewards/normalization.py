"""Scores of question-answering benchmarks.

Answers are normalized. If a question has several gold answers, the score is the highest score over the gold answers.
The normalization comes from SQuAD's evaluation script (Rajpurkar et al. 2016): lower case, no ASCII punctuation, no
articles, single spaces. HotpotQA (Yang et al. 2018) uses the same normalization.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def extract_answer(text: str) -> str | None:
    """Return the content of the last complete ``<answer>...</answer>``, or None if this content is blank.

    Also return None if there is no complete answer. The tags must be written exactly as ``<answer>`` and ``</answer>``.
    An answer without its closing tag is ignored.

    Example:
        >>> extract_answer("<answer>Rome</answer> no, <answer> Oslo </answer>")
        'Oslo'
    """
    answers = _ANSWER.findall(text)
    return answers[-1].strip() or None if answers else None


def normalize(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single spaces.

    Example:
        >>> normalize("The  Beatles' album, a classic!")
        'beatles album classic'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match_score(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the normalized prediction equals a normalized gold answer, else 0.0.

    Example:
        >>> exact_match_score("the Eiffel Tower.", ["Eiffel tower", "La tour Eiffel"])
        1.0
    """
    return float(normalize(prediction) in map(normalize, answers))


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Return the F1 over words between the prediction and a gold answer, in [0, 1]. The best gold answer counts.

    As in HotpotQA's script, "yes", "no" and "noanswer" match only themselves. Texts that are equal after normalization
    have F1 1.0, even if normalization leaves no words (as in SQuAD 2.0). Therefore F1 is never below the exact match.

    Example:
        >>> f1_score("Walt Disney Company", ["Walt Disney"])
        0.8
    """
    return max((_f1(normalize(prediction), normalize(answer)) for answer in answers), default=0.0)


def _f1(prediction: str, answer: str) -> float:
    if prediction == answer:
        return 1.0
    if prediction in _CLOSED_ANSWERS or answer in _CLOSED_ANSWERS:
        return 0.0
    predicted, gold = prediction.split(), answer.split()
    common = (Counter(predicted) & Counter(gold)).total()
    # 2PR / (P + R), with precision P = common / |predicted| and recall R = common / |gold|
    return 2 * common / (len(predicted) + len(gold)) if common else 0.0


def sub_match_score(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the normalized prediction contains a normalized gold answer, else 0.0.

    Whole words are compared. The first release of Agent-R1 compared characters: "no" matched "unknown". Therefore the
    scores of the first release are slightly higher.

    Example:
        >>> sub_match_score("It is in Paris, France", ["Paris"]), sub_match_score("unknown", ["no"])
        (1.0, 0.0)
    """
    return float(any(_contains(normalize(prediction), normalize(answer)) for answer in answers))


def _contains(prediction: str, answer: str) -> bool:
    return answer == prediction if not answer else f" {answer} " in f" {prediction} "

"""Answers as question answering benchmarks compare them: normalised, against every gold answer, the best counts.

Normalisation is that of SQuAD's evaluation script (Rajpurkar et al. 2016), which HotpotQA's (Yang et
al. 2018) shares: lower case, no ASCII punctuation, no articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_VERDICTS = frozenset({"yes", "no", "noanswer"})


def extract_answer(text: str) -> str | None:
    """What stands in the last complete ``<answer>...</answer>``; None where there is none or it is blank.

    Strict: the tags are matched as they are written here, and an answer that was cut off is none.

    Example:
        >>> extract_answer("<answer>Rome</answer> no, <answer> Oslo </answer>")
        'Oslo'
    """
    answers = _ANSWER.findall(text)
    return answers[-1].strip() or None if answers else None


def normalise(text: str) -> str:
    """
    Example:
        >>> normalise("The  Beatles' album, a classic!")
        'beatles album classic'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match_score(prediction: str, answers: Sequence[str]) -> float:
    """1.0 where the prediction equals one of the gold answers after normalisation, else 0.0.

    Example:
        >>> exact_match_score("the Eiffel Tower.", ["Eiffel tower", "La tour Eiffel"])
        1.0
    """
    return float(normalise(prediction) in map(normalise, answers))


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, for the gold answer it fits best, in 0..1.

    As in HotpotQA's script, yes, no and noanswer score only against themselves. Where nothing is
    left after normalisation, equality decides, as in SQuAD 2.0, so that F1 is never below exact match.

    Example:
        >>> f1_score("Walt Disney Company", ["Walt Disney"])
        0.8
    """
    return max((_f1(normalise(prediction), normalise(answer)) for answer in answers), default=0.0)


def _f1(prediction: str, answer: str) -> float:
    if prediction == answer:
        return 1.0
    if prediction in _VERDICTS or answer in _VERDICTS:
        return 0.0
    said, wanted = prediction.split(), answer.split()
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def sub_match_score(prediction: str, answers: Sequence[str]) -> float:
    """1.0 where a gold answer stands in the prediction, after normalisation, else 0.0.

    Whole words are compared. Agent-R1's first release looked for the characters anywhere, so that
    "no" matched "unknown"; figures made that way are a little higher.

    Example:
        >>> sub_match_score("It is in Paris, France", ["Paris"]), sub_match_score("unknown", ["no"])
        (1.0, 0.0)
    """
    return float(any(_stands_in(normalise(answer), normalise(prediction)) for answer in answers))


def _stands_in(answer: str, prediction: str) -> bool:
    return answer == prediction if not answer else f" {answer} " in f" {prediction} "

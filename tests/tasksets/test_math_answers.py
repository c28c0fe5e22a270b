"""Extraction of the answer: the last closed box, or the text after the last four hashes."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from agent_r1.tasksets.math import problems as answers
from agent_r1.tasksets.math.problems import boxed_answer, stated_answer

INNER = st.recursive(
    st.text(st.sampled_from("ab1+-, "), min_size=1),
    lambda inner: st.lists(inner).map(lambda some: f"{{{''.join(some)}}}"),
)


@given(INNER.filter(str.strip), st.text(st.sampled_from("xy {}$.\\"), max_size=20))
def test_the_content_of_balanced_braces_is_found(inner: str, after: str) -> None:
    assert boxed_answer(rf"so \boxed{{{inner}}}{after}") == inner.strip()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{a \\ {b}}", r"a \\ {b}"),
        (r"\boxed 7", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{1} but rather \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{1", None),
        (r"\boxed{ }", None),
        ("It is 7.", None),
        ("6 * 3\n#### 18", "18"),
        ("#### 1,234  \n", "1,234"),
        ("#### 1\n#### 2", "2"),
        ("so #### 3", None),
        ("####3", None),
        ("\\boxed{4}\n#### 5", "4"),
        ("", None),
    ],
)
def test_the_last_answer_in_the_right_format_counts(text: str, answer: str | None) -> None:
    assert stated_answer(text) == answer


class CountedPattern:
    """A pattern that counts the matches that are looked at."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern, self.matches = pattern, 0

    def finditer(self, text: str, *start: int) -> Iterator[re.Match[str]]:
        for match in self._pattern.finditer(text, *start):
            self.matches += 1
            yield match


@pytest.mark.parametrize("piece", [r"\boxed{", r"\boxed{ }", r"\boxed{ {", r"}\fbox{", r"\boxed "])
def test_the_work_on_an_answer_grows_with_its_length(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(times: int) -> int:
        counted = CountedPattern(answers._BRACE)
        with monkeypatch.context() as patched:
            patched.setattr(answers, "_BRACE", counted)
            stated_answer(piece * times)
        return counted.matches

    assert work(2000) <= 2 * work(1000) + 10 and work(1000) <= 4000


def test_lines_of_hashes_with_much_white_space_are_read_once() -> None:
    assert stated_answer("#### a" + " " * 200_000 + "b") == "a" + " " * 200_000 + "b"
    assert stated_answer("#### 18 \t \n\n") == "18"

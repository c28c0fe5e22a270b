r"""Rules that refuse an answer because of its form, even if its value is right.

math-verify computes the value of every answer. Without these rules, a policy could copy an expression from the
question, such as ``\sqrt{242}`` for the gold answer ``11\sqrt{2}``.
"""

from __future__ import annotations

import re

from agent_r1.tasksets.math.normalization import strip_notation

_BASED = re.compile(r"(?P<digits>[0-9A-Za-z]+)_\{?(?P<base>\d+)\}?")
_NAMED = re.compile(r"\\(sum|prod|int|lim|gcd|lcm|binom|min|max|pmod|bmod|mod|lfloor|lceil|det)(?![a-zA-Z])")
_PLAIN_NAMED = re.compile(r"(?<![a-zA-Z\\])(gcd|lcm|min|max|floor|ceil|binom)\s*\(")
_FUNCTION = re.compile(r"\\?(log|ln|lg|exp|sin|cos|tan|cot|sec|csc|sqrt)(?![a-zA-Z])|\|(?=.*\|)")
_SCALE = re.compile(r"(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{-?\d+\}|\d)")
_TERM = r"(?:\d+(?:\.\d+)?|\\[dt]?frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d)|\))"
_ARITHMETIC = re.compile(
    rf"(?<![\w^.]){_TERM}\s*(?:[-+*]|\\cdot|\\times|\\div)\s*[-(]*{_TERM}(?!\s*(?:[\w.^]|\\(?:sqrt|pi|cdot)))"
)
_POWER = re.compile(r"(?<![\w.])(?:\d+(?:\.\d+)?|\)|\})\s*(?:\^|\*\*)\s*(?!\{?\\circ)")
_LETTERS = re.compile(r"\\[a-zA-Z]+|(?<![a-zA-Z])[ie](?![a-zA-Z])")
_EXPRESSION = re.compile(r"\$\$?([^$]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_VECTOR = re.compile(r"\\begin\{[pb]matrix\}(?P<rows>.*?)\\end\{[pb]matrix\}", re.DOTALL)


def refusal_reason(gold: str, said: str, question: str) -> str | None:
    """Return the reason to refuse the form of the agent's answer, for example because the answer is a sum that is not
    computed. Return None if the form is acceptable.

    ``gold`` is the right answer, and ``said`` is the agent's answer. The two answers must be normalized
    (:func:`normalize_answer`). If they have the same text (:func:`same_text`), the form is acceptable.
    """
    if same_text(gold, said):
        return None
    if any(_stands_in(_key(said), strip_notation(part)) for part in expressions(question)):
        return "it stands in the question"
    if _base(said) != _base(gold) and not (_base(gold) is None and "base" in question):
        return "it is in another base"
    if left := sorted(_operators(said) - _operators(gold)):
        return f"it is not worked out: {', '.join(left)}"
    if "=" not in gold and (re.search(r"=[^,;]*=", said) or re.match(r"\s*[-\d.]+\s*=", said)):
        return "it is an equation of two values"
    if not _may_equal(_kind(gold), _kind(said)):
        return "it is another kind of thing: a list, a set, a tuple, an interval"
    return None


def match_shape(gold: str, said: str) -> str:
    r"""Return the right answer ``gold`` in the notation of the agent's answer ``said``.

    A vector becomes a tuple if the agent's answer is a tuple.

    Example:
        match_shape(r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,3)") == "(1,2)"
    """
    found = _VECTOR.fullmatch(gold.strip())
    if found is None or _kind(said) != "tuple" or ("&" in found["rows"] and r"\\" in found["rows"]):
        return gold
    parts = re.split(r"\\\\|&", found["rows"])
    return f"({','.join(part.strip() for part in parts)})"


def expressions(question: str) -> tuple[str, ...]:
    r"""Return the texts in ``$..$``, ``$$..$$``, ``\[..\]`` and ``\(..\)`` of a question."""
    return tuple(next(filter(None, found)).strip() for found in _EXPRESSION.findall(question))


def same_text(gold: str, said: str) -> bool:
    """Return whether two normalized answers have the same text, apart from notation such as spaces and braces."""
    return _key(said) == _key(gold)


def _key(answer: str) -> str:
    text = re.sub(r"^[a-z]=", "", strip_notation(answer))
    return re.sub(r"^\(([a-z])\)$", r"\1", text)


def _stands_in(said: str, question: str) -> bool:
    return bool(said) and re.search(rf"(?<![\w.\\]){re.escape(said)}(?!\w|\.\d)", question) is not None


def _base(answer: str) -> str | None:
    found = _BASED.fullmatch(answer.replace(" ", ""))
    return found["base"] if found and found["base"] != "10" else None


def _operators(answer: str) -> set[str]:
    """Return the operations that ``answer`` leaves to be computed, such as {"arithmetic"} for ``17 + 1``.

    If ``answer`` contains a variable, only named operations, such as "gcd", are returned. For example, the returned set
    is empty for ``x + 1``. Every letter counts as a variable, except the constants i and e and the letters of LaTeX
    commands.
    """
    found = {name for kind in (_NAMED, _PLAIN_NAMED) for name in kind.findall(answer)}
    text = _SCALE.sub("", answer)
    if re.search("[a-zA-Z]", _LETTERS.sub("", text)):
        return found
    found |= {"!"} if "!" in text else set()
    found |= {"function"} if _FUNCTION.search(text) else set()
    found |= {"arithmetic"} if _ARITHMETIC.search(text) else set()
    return found | ({"power"} if _POWER.search(text) else set())


def _kind(answer: str) -> str:
    text = re.sub(r"\\left|\\right|\s", "", answer)
    if text.startswith(r"\{"):
        return "set"
    if r"\cup" in text:
        return "interval"
    inner = text[1:-1] if text[:1] in ("(", "[") and text[-1:] in (")", "]") else None
    if inner is None:
        return "list" if r"\pm" in text or ("," in text and r"\begin" not in text) else "one"
    if text[0] == "(" and text[-1] == ")":
        return "tuple" if "," in inner else "one"
    return "interval"


def _may_equal(gold: str, said: str) -> bool:
    """Return whether two answers can be equal, judged only by their kinds.

    ``gold`` is the kind of the gold answer, and ``said`` is the kind of the agent's answer. The kinds are "set",
    "list", "tuple", "interval" and "one" (a single expression). A set may be written as a list, without braces. A gold
    set of one element may be written as this element.
    """
    return gold == said or {gold, said} == {"set", "list"} or (gold, said) == ("set", "one") or "one" == gold == said

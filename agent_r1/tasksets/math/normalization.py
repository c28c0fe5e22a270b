"""Normalize answers: remove units, currency signs and other text around a number, and write numbers in one way."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

_SIGNS = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | {
        "\N{MINUS SIGN}": "-",
        "²": "^2",
        "³": "^3",
        "π": r"\pi ",
        "∞": r"\infty ",
        "°": r"^\circ ",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "·": r"\cdot ",
    }
    | {"≤": r"\le ", "≥": r"\ge ", "÷": "/", "\N{NO-BREAK SPACE}": " "}
)
_ROOT = re.compile(r"√\s*(?:\((?P<inner>[^()]*)\)|(?P<bare>\w+))")
_CURRENCY = re.compile(r"^\s*(?P<sign>-?)\s*(?:\\?\$|\\pounds\b|[£€¥])\s*(?=[-\d.])|\s*(?:\\?\$|[£€¥])\s*$")
_BEFORE = re.compile(r"^(?:=|[a-z]\s*\\in\b)\s*")
_AFTER = re.compile(r"(?:\\[,!;: ]|[.,;\s])+$")
_BETWEEN = re.compile(r"\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s)\s*")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_DIGITS_APART = re.compile(r"(?<=\d)(,?)(?:\\[,!;: ]|\{,\}|~)\s*(?=\d)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d*)?")
_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?"
_WITH_UNIT = re.compile(
    rf"(?P<number>{_NUMBER}|[-+]?\d+ \d+/\d+)\s+(?P<unit>[A-Za-z]+(?:[ /.-]+[A-Za-z]+)*)\.?(?:\s*\^\s*\{{?[23]\}}?)?"
)
_SHORT_UNIT = re.compile("cm|mm|km|ft|in|kg|mg|ml|mi|lb|lbs|oz|hr|hrs|mph|kph|m|s|g|h|l")
_NO_UNIT = re.compile(
    "am|pm|and|or|not|plus|minus|times|over|squared|cubed|percent|half|hundred"
    "|thousand|million|billion|dozen|sin|cos|tan|sqrt|log|the|mod|base|choose|more|less"
)
_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,2}")
_MIXED = re.compile(r"(?P<sign>-?)(?P<whole>\d+) +(?P<top>\d+)/(?P<bottom>0*[1-9]\d*)")
_REPEATING = re.compile(r"(?P<sign>-?)(?P<whole>\d*)\.(?P<head>\d*)\\overline\s*\{(?P<tail>\d+)\}")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+)")
_FRACTION = re.compile(
    r"(?P<sign>-?)\\[dt]?frac\s*(?:\{(?P<top>\d+)\}|(?P<one>\d))\s*(?:\{(?P<bottom>\d+)\}|(?P<other>\d))"
)
_ORDER = re.compile(r"<|>|\\leq?\b|\\geq?\b")
_NAME = re.compile(r"[a-zA-Z]")


def normalize_answer(answer: str) -> str:
    r"""Return the answer in a notation that math-verify can parse. Unknown notation is left unchanged.

    Example:
        >>> normalize_answer("£1,000."), normalize_answer("1 1/2"), normalize_answer("x<2")
        ('1000', '3/2', '(-\\infty,2)')
    """
    text = answer.translate(_SIGNS).strip().removeprefix("$").removesuffix("$").strip()
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found['inner'] or found['bare']}}}", text)
    text = _AFTER.sub("", _BEFORE.sub("", text))
    text = _CURRENCY.sub(lambda found: found["sign"] or "", text)
    text = _DIGITS_APART.sub(r"\1", text).strip()
    return _BETWEEN.sub(", ", _as_intervals(_as_number(_without_unit(text))))


def repeating_decimal(answer: str) -> str:
    r"""Convert a repeating decimal to a fraction, because math-verify cannot parse repeating decimals. Return any other
    answer unchanged.

    Example:
        >>> repeating_decimal(r"0.1\overline{6}")
        '1/6'
    """
    found = _REPEATING.fullmatch(answer)
    if found is None:
        return answer
    whole, head, tail = found["whole"] or "0", found["head"], found["tail"]
    value = Fraction(int(whole + head + tail) - int(whole + head), 10 ** len(head) * (10 ** len(tail) - 1))
    return f"{found['sign']}{value}"


def strip_notation(text: str) -> str:
    """Return a text in a simpler notation for comparison.

    Spaces, braces and layout commands are removed. Simple fractions become ``a/b``, and letters become lower case.
    """
    text = _FRACTION.sub(_over, text)
    bare = re.sub(r"\\(?:left|right|text|mathrm|mathbf|displaystyle)\b|\\[,!;: ]|\^\{?\\circ\}?|[\s{}$]", "", text)
    return re.sub(r"\\[dt]frac\b", r"\\frac", bare).casefold()


def _without_unit(text: str) -> str:
    found = _WITH_UNIT.fullmatch(re.sub(r"(?:\\ )? +", " ", _WRAPPED.sub(r" \1", text)).strip())
    return found["number"] if found and _is_unit(found["unit"]) else text


def _is_unit(text: str) -> bool:
    words = re.split(r"[ /.-]+", text.casefold())
    first = bool(_SHORT_UNIT.fullmatch(words[0])) or (len(words[0]) > 2 and bool(set(words[0]) & set("aeiou")))
    return first and not any(map(_NO_UNIT.fullmatch, words))


def _as_number(text: str) -> str:
    if _THOUSANDS.fullmatch(text):
        text = re.sub("[, ]", "", text)
    if _SCIENTIFIC.fullmatch(text):
        return f"{Decimal(text):f}"
    if found := _MIXED.fullmatch(text):
        return f"{found['sign']}{int(found['whole']) + Fraction(int(found['top']), int(found['bottom']))}"
    if found := _FRACTION.fullmatch(text):
        return _over(found)
    if _DECIMAL.fullmatch(text):
        return text.rstrip("0").rstrip(".") or "0"
    return text


def _over(found: re.Match[str]) -> str:
    return f"{found['sign']}{found['top'] or found['one']}/{found['bottom'] or found['other']}"


def _as_intervals(text: str) -> str:
    r"""Return inequalities of one letter, such as ``x<2 or x>3``, as intervals. Return other texts unchanged."""
    parts = re.split(r"\s*(?:\bor\b|\\text\s*\{\s*or\s*\}|\\cup)\s*", text)
    intervals = [_interval(part) for part in parts]
    return r"\cup".join(each for each in intervals if each) if all(intervals) else text


def _interval(text: str) -> str | None:
    sides, signs = [side.strip() for side in _ORDER.split(text)], _ORDER.findall(text)
    if len(signs) == 2 and _NAME.fullmatch(sides[1]) and all(s[0] == "<" or s.startswith(r"\le") for s in signs):
        return f"{_opening(signs[0])}{sides[0]},{sides[2]}{_closing(signs[1])}"
    if len(signs) != 1 or not all(sides):
        return None
    (sign,), (left, right) = signs, sides
    if _NAME.fullmatch(right) and not _NAME.fullmatch(left):
        left, right, sign = right, left, sign.translate(str.maketrans("<>lg", "><gl"))
    if not _NAME.fullmatch(left) or _NAME.search(re.sub(r"\\[a-zA-Z]+", "", right)):
        return None
    below = sign[0] == "<" or sign.startswith(r"\le")
    return rf"(-\infty,{right}{_closing(sign)}" if below else rf"{_opening(sign)}{right},\infty)"


def _opening(sign: str) -> str:
    return "[" if "e" in sign else "("


def _closing(sign: str) -> str:
    return "]" if "e" in sign else ")"

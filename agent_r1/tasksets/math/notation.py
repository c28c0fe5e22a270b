r"""The notation of answers: write them so that math-verify can parse them, and refuse answers because of their form.

math-verify computes the value of every answer. Without a rule about the form, a policy could copy an expression from
the question, such as ``\sqrt{242}`` for the gold answer ``11\sqrt{2}``.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

_SYNONYMS = {
    "": "! left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle",
    " ": ", : ; > quad qquad enspace thinspace medspace thickspace space nobreakspace",
    r"\le ": "le leq leqq leqslant ≤ ⩽",
    r"\ge ": "ge geq geqq geqslant ≥ ⩾",
    r"\ne ": "ne neq ≠",
    "<": "lt",
    ">": "gt",
    r"\emptyset ": "emptyset varnothing ∅",
    r"\cup ": "cup \N{UNION}",
    r"\in ": "in ∈",
    r"\pm ": "pm ±",
    r"\cdot ": "cdot · ⋅ ∙",
    r"\times ": "times \N{MULTIPLICATION SIGN}",
    r"\infty ": "infty ∞",
    r"\pi ": "pi π",
    r"^\circ ": "degree ° º ˚ ∘",
    r"\frac": "frac dfrac tfrac cfrac",
    r"\text": "text textbf textit textrm textnormal mathrm mathbf mathit mathsf boldsymbol bm mbox",
    r"\{": "lbrace",
    r"\}": "rbrace",
    "[": "lbrack",
    "]": "rbrack",
    "/": "÷ \N{FRACTION SLASH} \N{DIVISION SLASH}",
    "-": "\N{MINUS SIGN}",
    "%": "%",
    "$": "$",
}
_CANONICAL = {name: text for text, names in _SYNONYMS.items() for name in names.split()} | {" ": " "}
# As in LaTeX, the name of a command ends before the first character that is no letter: "x\ge3" contains \ge.
_COMMAND = re.compile(r"\\([a-zA-Z]+|.)", re.DOTALL)
# math-verify reads "3 i" as a complex number, and "3i" as 3 times a letter.
_IMAGINARY = re.compile(r"(?<=\d)i(?![a-zA-Z])")
_RAISED, _LOWERED, _ONE_FRACTION = re.compile("[²³¹⁰ⁱ⁴-⁹⁺⁻ⁿ]+"), re.compile("[₀-₉₊₋]+"), re.compile("[¼-¾⅐-⅞]")
_EMPTY_SET = re.compile(r"\\\{\s*\\\}")
_MATRIX = re.compile(
    r"[(\[]\s*\\begin\{(?P<kind>matrix|array)\}(?:\{[lcr| ]*\})?(?P<rows>.*)\\end\{(?P=kind)\}\s*[)\]]", re.DOTALL
)
_ROOT = re.compile(r"√\s*(?:\((?P<inner>[^()]*)\)|(?P<bare>\w+))")
_CURRENCY = re.compile(r"^\s*(?P<sign>-?)\s*(?:[$£€¥₹]|\\pounds(?![a-zA-Z]))\s*(?=[-\d.])|\s*[$£€¥₹]\s*$")
_BEFORE = re.compile(r"^(?:=|[a-z]\s*\\in )\s*")
_AFTER = re.compile(r"[.,;\s]+$")
_PERCENT = re.compile(r"\s*(?:%|\\text\s*\{\s*(?:percent|%)\s*\}|percent)$")
_BETWEEN = re.compile(r"(?:\s*,)?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<=[\s,])(?:and|or)\s)\s*")
_WRAPPED = re.compile(r"\\text\s*\{([^{}]*)\}")
_WRAPPED_MATH = re.compile(r"\\text\s*\{\s*(\w*\d\w*|[ie$%])\s*\}")
# math-verify would read two numbers with a space between them as one. In "\frac1 2" the space separates arguments.
_GROUPED = re.compile(r"(?<=\d)(,?)(?:\\[,!;: ]|\{,\}|~)\s*(?=\d{3}(?!\d))")
_APART = re.compile(r"(?<![\d_^])(?<!\\frac)(?<!\\frac )\d+(?:\s|(?:\\text\s*)?\{[\s,]*\})+(?!\d{3}(?!\d))\d")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d*)?")
_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?"
_WITH_UNIT = re.compile(
    rf"(?P<number>{_NUMBER}|[-+]?\d+ \d+/\d+)\s+(?P<unit>[A-Za-z]+(?:[ /.-]+[A-Za-z]+)*)\.?(?:\s*\^\s*\{{?[23]\}}?)?"
)
_UNIT_BEGINS = re.compile(r"(?<=\d)(?=(?:cm|mm|km|ft|in|kg|mg|ml|lbs?|oz|hrs?|mph|kph)(?![a-zA-Z]))")
_WRAPPED_UNIT = re.compile(
    r"(?<=\S)\s*(?:\\text\s*\{(?P<unit>[^{}\d]*)\}\s*(?:\^\s*(?:[23]|\{[23]\}))?(?:[\s/.]|\\cdot )*)+$"
)
_SHORT_UNIT = re.compile("cm|mm|km|ft|in|kg|mg|ml|mi|lb|lbs|oz|hr|hrs|mph|kph|m|s|g|h|l")
_NO_UNIT = re.compile(
    "am|pm|and|or|not|plus|minus|times|over|squared|cubed|percent|half|hundred"
    "|thousand|million|billion|dozen|sin|cos|tan|sqrt|log|mod|base|choose|more|less"
)
_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,2}")
_MIXED = re.compile(r"(?P<sign>-?)(?P<whole>\d+) +(?P<top>\d+)/(?P<bottom>0*[1-9]\d*)")
_REPEATING = re.compile(r"(?P<sign>-?)(?P<whole>\d*)\.(?P<head>\d*)\\overline\s*\{(?P<tail>\d+)\}")
_FRACTION = re.compile(r"(?P<sign>-?)\\frac\s*(?:\{(?P<top>\d+)\}|(?P<one>\d))\s*(?:\{(?P<bottom>\d+)\}|(?P<other>\d))")
_ORDER = re.compile(r"<|>|\\[lg]e ")
_TURNED = str.maketrans("<>lg", "><gl")
_NAME = re.compile(r"[a-zA-Z]")


def normalize_answer(answer: str) -> str:
    r"""Return the answer in a notation that math-verify can parse. Unknown notation is left unchanged.

    Example:
        >>> normalize_answer("£1,000."), normalize_answer("1 1/2"), normalize_answer("x<2")
        ('1000', '3/2', '(-\\infty,2)')
    """
    text = canonical(_GROUPED.sub(r"\1", answer)).strip().removeprefix("$").removesuffix("$").strip()
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found['inner'] or found['bare']}}}", text)
    text = _MATRIX.sub(lambda found: rf"\begin{{pmatrix}}{found['rows']}\end{{pmatrix}}", text)
    text = _AFTER.sub("", _BEFORE.sub("", text))
    text = _CURRENCY.sub(lambda found: found["sign"] or "", text).strip()
    number = _PERCENT.sub("", text)
    percent = "%" if number != text else ""
    return _BETWEEN.sub(", ", _as_intervals(_as_number(_without_unit(number)))) + percent


def canonical(text: str) -> str:
    r"""Return LaTeX with one spelling for each command and character that have synonyms.

    Example:
        >>> canonical(r"5\,\mathrm{cm}"), canonical(r"x\geqslant3"), canonical("2½x²")
        ('5 \\text{cm}', 'x\\ge 3', '2\\frac{1}{2}x^{2}')
    """
    text = "".join(_CANONICAL.get(character, character) if character > "\x7f" else character for character in text)
    # NFKC alone would make "x2" of "x²" and "21/2" of "2½".
    text = _RAISED.sub(r"^{\g<0>}", _LOWERED.sub(r"_{\g<0>}", text))
    text = unicodedata.normalize("NFKC", _ONE_FRACTION.sub(r"\\frac{\g<0>}", text)).replace("\N{MINUS SIGN}", "-")
    text = text.replace("\N{FRACTION SLASH}", "}{")
    categories = ((character, unicodedata.category(character)) for character in text)
    text = "".join("-" if category == "Pd" else character for character, category in categories if category != "Cf")
    text = _COMMAND.sub(lambda found: _CANONICAL.get(found[1], found[0]), text)
    text = text.replace("~", " ").replace("<=", r"\le ").replace(">=", r"\ge ")
    text = _WRAPPED_MATH.sub(r"\1", _EMPTY_SET.sub(r"\\emptyset ", text))
    return _IMAGINARY.sub(" i", text)


def repeating_decimal(answer: str) -> str:
    r"""Return a repeating decimal as a fraction (``1/6`` for ``0.1\overline{6}``), and any other answer unchanged."""
    found = _REPEATING.fullmatch(answer)
    if found is None:
        return answer
    whole, head, tail = found["whole"] or "0", found["head"], found["tail"]
    # 0.1(6) = (16 - 1) / 90: math-verify cannot parse the bar.
    value = Fraction(int(whole + head + tail) - int(whole + head), 10 ** len(head) * (10 ** len(tail) - 1))
    return f"{found['sign']}{value}"


def pairs_to_compare(gold: str, said: str) -> tuple[tuple[str, str], ...]:
    """Return pairs of answers, one of which must be equal: if only one answer is a percentage, "50%" is 50 or 0.5."""
    pair = repeating_decimal(gold.removesuffix("%")), repeating_decimal(said.removesuffix("%"))
    if gold.endswith("%") == said.endswith("%"):
        return (pair,)
    return pair, (f"({pair[0]})/100", pair[1]) if gold.endswith("%") else (pair[0], f"({pair[1]})/100")


def strip_notation(text: str) -> str:
    """Return a text without spaces, braces and layout commands, with ``a/b`` for simple fractions, in lower case."""
    text = _FRACTION.sub(lambda f: f"{f['sign']}{f['top'] or f['one']}/{f['bottom'] or f['other']}", canonical(text))
    text = re.sub(r"(?<=\d)\s*[{}]+\s*(?=\d)", "|", text)
    return re.sub(r"\\text(?![a-zA-Z])|\^\{?\\circ\s*\}?|[\s{}$]", "", text).casefold()


def _without_unit(text: str) -> str:
    plain = re.sub(" +", " ", _WRAPPED.sub(r" \1", text)).strip()
    if (found := _WITH_UNIT.fullmatch(_UNIT_BEGINS.sub(" ", plain))) and _is_unit(found["unit"]):
        return found["number"]
    wrapped = _WRAPPED_UNIT.search(text)
    words = re.split("[^a-z]+", wrapped["unit"].replace(".", "").casefold()) if wrapped else ()
    return text if wrapped is None or any(map(_NO_UNIT.fullmatch, words)) else text[: wrapped.start()]


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
    return text


def _as_intervals(text: str) -> str:
    # Inequalities of one letter, such as "x<2 or x>3", become a union of intervals.
    parts = re.split(r"\s*(?:\bor\b|\\text\s*\{\s*or\s*\}|\\cup )\s*", text)
    intervals = [_interval(part) for part in parts]
    return r"\cup".join(each for each in intervals if each) if all(intervals) else text


def _interval(text: str) -> str | None:
    sides, signs = [side.strip() for side in _ORDER.split(text)], _ORDER.findall(text)
    above = [sign for sign in signs if ">" in sign or "g" in sign]
    if len(above) == len(signs):  # "2>x" is written as "x<2"
        sides, above, signs = sides[::-1], [], [sign.translate(_TURNED) for sign in signs[::-1]]
    if above or not all(sides):
        return None
    numbers = [not _NAME.search(re.sub(r"\\[a-zA-Z]+", "", side)) for side in sides]
    brackets = ["[]" if "e" in sign else "()" for sign in signs]
    match sides:
        case [low, name, high] if _NAME.fullmatch(name):
            return f"{brackets[0][0]}{low},{high}{brackets[1][1]}"
        case [name, high] if _NAME.fullmatch(name) and numbers[1]:
            return rf"(-\infty,{high}{brackets[0][1]}"
        case [low, name] if _NAME.fullmatch(name) and numbers[0]:
            return rf"{brackets[0][0]}{low},\infty)"
    return None


_BASED = re.compile(r"(?P<digits>[0-9A-Za-z]+)_\{?(?P<base>\d+)\}?")
_NAMED = re.compile(r"\\(sum|prod|int|lim|gcd|lcm|binom|min|max|pmod|bmod|mod|lfloor|lceil|det)(?![a-zA-Z])")
_PLAIN_NAMED = re.compile(r"(?<![a-zA-Z\\])(gcd|lcm|min|max|floor|ceil|binom)\s*\(")
_FUNCTION = re.compile(r"\\?(log|ln|lg|exp|sin|cos|tan|cot|sec|csc|sqrt)(?![a-zA-Z])|\|(?=.*\|)")
_SCALE = re.compile(r"(?:^-?|\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{-?\d+\}|\d)")
_TERM = r"(?:\d+(?:\.\d+)?|\\frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d)|\))"
_ARITHMETIC = re.compile(
    rf"(?<![\w^.]){_TERM}\s*(?:[-+*]|\\cdot|\\times|\\div)\s*[-(]*{_TERM}(?!\s*(?:[\w.^]|\\(?:sqrt|pi|cdot)))"
)
_POWER = re.compile(r"(?:(?<![\w.])\d+(?:\.\d+)?|[)}])\s*(?:\^|\*\*)\s*(?!\{?\\circ)")
_FRACTIONAL_POWER = re.compile(r"\^\s*\{\s*(?:\d+/\d+|\\frac\s*\{?\d+\}?\s*\{?\d+\}?)\s*\}")
_NO_VARIABLE = re.compile(
    r"\\(?!alpha|beta|gamma|theta|lambda|phi)[a-zA-Z]+|(?<![a-zA-Z])(?:[ie]|sqrt|infinity)(?![a-zA-Z])"
)
# What stands before a value ("x =", "|AB| ="), and the forms of one number without spaces and braces ("\frac12").
_LEFT_SIDE = re.compile(r"(?:^|(?<=,))\s*(?:\([a-z](?:,\s*[a-z])+\)|[a-zA-Z\\|][^=,]*)\s*=")
_LITERAL = re.compile(
    r"\(?[-+]?\(?[-+]?(?=[\d.\\])(?:\d*\\frac[-+.\d]+|[\d.]+(?:\\overline\d+)?(?:(?:/|:|\\over)[-+]?[\d.]+)?)?"
    r"(?:(?:\\times|\\cdot|\*)?10\^-?\d+)?(?:\)|%|\^\\circ|_10)*"
)
_EXPRESSION = re.compile(r"\$\$?([^$]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_VECTOR = re.compile(r"\\begin\{[pb]matrix\}(?P<rows>.*?)\\end\{[pb]matrix\}", re.DOTALL)


def refusal_reason(gold: str, said: str, question: str) -> str | None:
    """Return the reason to refuse the form of the agent's answer ``said``; None if the form is acceptable.

    The two answers must be normalized (:func:`normalize_answer`). The form of a sum that is not computed, for example,
    is refused, unless the right answer ``gold`` has the same text.
    """
    if _APART.search(said) and not _APART.search(gold):
        return "its digits stand apart"
    if same_text(gold, said):
        return None
    equal = (_stands_in(_key(said), strip_notation(part)) for part in expressions(question))
    if any(equal) or any(map(_operators, copied_parts(gold, said, question))):
        return "it stands in the question"
    if _base(said) != _base(gold) and not (_base(gold) is None and "base" in question):
        return "it is in another base"
    if left := sorted(_operators(said) - _operators(gold)):
        return f"it is not worked out: {', '.join(left)}"
    wanted, given = re.sub(r"^[a-zA-Z]\s*=", "", gold), _LEFT_SIDE.sub("", said)
    if _has_variable(given) and not _has_variable(wanted):
        return "it has a variable"
    if _is_literal(wanted) and "." not in wanted and not _is_literal(given):
        return "it is not worked out: it is no number"
    if "=" not in gold and (re.search(r"=[^,;]*=", said) or re.match(r"\s*[-\d.]+\s*=", said)):
        return "it is an equation of two values"
    # A set may be written as a list, without braces, and a gold set of one element as this element.
    kinds = _kind(gold), _kind(said)
    if kinds[0] != kinds[1] and kinds not in (("set", "list"), ("list", "set"), ("set", "one")):
        return "it is another kind of thing: a list, a set, a tuple, an interval"
    return None


def copied_parts(gold: str, said: str, question: str) -> tuple[str, ...]:
    """Return the expressions of the question that occur in the agent's answer ``said``, and not in ``gold``."""
    keys = {canonical(part): re.escape(strip_notation(part)) for part in expressions(question)}
    found = {part: re.compile(rf"(?:(?<!\d)|(?=\D)){key}(?!\d)").search for part, key in keys.items() if key}
    return tuple(part for part, search in found.items() if search(_key(said)) and not search(_key(gold)))


def is_text(gold: str, question: str) -> bool:
    """Return whether the right answer consists of words: letters that are not all variables of the question."""
    words = words_of(gold)
    variables = "" if r"\text" in gold else re.sub(r"\\[a-zA-Z]+", "", "".join(expressions(question))).casefold()
    return not set("".join(words)) <= set(variables) and all(map(str.isalpha, words)) and max(map(len, words)) > 1


def words_of(answer: str) -> list[str]:
    """Return the words of an answer in a fixed order: the order of a list does not matter."""
    return sorted(re.sub(r"^\\(.*)\\$", r"\1", _key(answer)).split(","))


def match_shape(gold: str, said: str) -> str:
    r"""Return the right answer; a vector becomes a tuple ``(1,2)`` if the agent's answer ``said`` is a tuple."""
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
    return re.sub(r"^\(([a-z]+)\)$", r"\1", text)


def _is_literal(answer: str) -> bool:
    return _LITERAL.fullmatch(re.sub(r"[\s{}]", "", answer)) is not None


def _has_variable(answer: str) -> bool:
    return re.search("[a-zA-Z]", _NO_VARIABLE.sub("", answer)) is not None


def _stands_in(said: str, question: str) -> bool:
    return bool(said) and re.search(rf"(?<![\w.\\]){re.escape(said)}(?!\w|\.\d)", question) is not None


def _base(answer: str) -> str | None:
    found = _BASED.fullmatch(answer.replace(" ", ""))
    return found["base"] if found and found["base"] != "10" else None


def _operators(answer: str) -> set[str]:
    # The operations that an answer leaves to be computed, such as {"arithmetic"} for "17 + 1". In an answer with a
    # variable ("x + 1") only named operations such as "gcd" count.
    found = {name for kind in (_NAMED, _PLAIN_NAMED) for name in kind.findall(answer)}
    text = _LEFT_SIDE.sub("", answer)
    if _has_variable(text):
        return found
    text = _FRACTIONAL_POWER.sub(r"\\sqrt", _SCALE.sub("", text))
    found |= {"!"} if "!" in text else set()
    found |= {"function"} if _FUNCTION.search(text) else set()
    found |= {"arithmetic"} if _ARITHMETIC.search(text) else set()
    return found | ({"power"} if _POWER.search(text) else set())


def _kind(answer: str) -> str:
    text = re.sub(r"\s", "", answer)
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

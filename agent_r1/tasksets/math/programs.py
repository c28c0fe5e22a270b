"""Programs that compute the answers of GSM8K, from the computations that its worked solutions mark."""

from __future__ import annotations

import ast
import operator
import re
from string import ascii_lowercase

_MARK = re.compile(r"<<([^=<>]+)=[^<>]+>>")
_FORMULA = re.compile(r"(?:^|\s)[\s\d.,+\-*/x()$%]*=\s*\$?$")  # the written form before a mark: " 48/2 = "
_WRITTEN = re.compile(r"^[\d.,]*\d")  # the written result after a mark
_NUMBER = re.compile(r"(?<![\w.])\d*\.?\d+(?![\w.])")
_LAST_LINE = re.compile(r"^#### .*\Z", re.MULTILINE)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def without_marks(worked: str) -> str:
    """Return the sentences of a worked solution, without marks and without a last line such as ``#### 18``."""
    return _LAST_LINE.sub("", re.sub(r"<<[^<>]*>>", "", worked)).strip()


def program_of(question: str, worked: str, answer: str) -> str | None:
    """Return Python code that prints ``answer``: one variable per marked computation, below a comment of what it is.

    None if there is no mark, if one is not plain arithmetic, or if the last one does not compute the answer.

    Example:
        >>> print(program_of("How many?", "Sold 96/2 = <<96/2=48>>48 in May. In all <<96+48=144>>144.", "144"))
        # Sold
        a = 96/2
        # in May. In all
        b = 96+a
        print(b)
    """
    given = {float(number) for number in _NUMBER.findall(question.replace(",", ""))} | {100.0}
    lines: list[str] = []
    values: dict[str, float] = {}
    computes = False  # whether the last line does
    for sentence in _LAST_LINE.sub("", worked).splitlines():
        pieces = _MARK.split(sentence)  # text, computation, text, computation, text
        for index, computation in enumerate(pieces[1::2]):
            before, after = pieces[2 * index], pieces[2 * index + 2]
            if len(values) == len(ascii_lowercase):
                return None
            # A number that an earlier line computed becomes its name, unless it can be a number of the question, or 100
            names = {value: name for name, value in values.items() if value not in given}
            code = _NUMBER.sub(lambda found, names=names: names.get(float(found[0]), found[0]), computation.strip())
            value = _compute(code, values)
            if value is None:
                return None
            computes = re.search(r"\S[-+*/]", code) is not None
            name = ascii_lowercase[len(values)]
            values[name] = value
            before = before if index == 0 else _WRITTEN.sub("", before)  # after the result of the mark before it
            comment = _comment(before, _WRITTEN.sub("", after) if after is pieces[-1] else "")
            # A comment that has the result would teach to guess it before it is computed.
            if comment and value not in map(_as_number, _NUMBER.findall(comment)):
                lines.append(f"# {comment}")
            lines.append(f"{name} = {code}")
    wanted = _as_number(answer.replace(",", ""))
    if not computes or wanted is None or abs(values[name] - wanted) > 1e-6:
        return None
    return "\n".join([*lines, f"print({name})"])


def _comment(before: str, after: str) -> str:
    return " .. ".join(text for part in (_FORMULA.sub("", before), after) if (text := part.strip(" .,$%=")))


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _compute(code: str, values: dict[str, float]) -> float | None:
    def value_of(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Name(id=name):
                return values[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value_of(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return float(_OPERATORS[type(op)](value_of(left), value_of(right)))
        raise ValueError(node)

    try:
        return value_of(ast.parse(code, mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None

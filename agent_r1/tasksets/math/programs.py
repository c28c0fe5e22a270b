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
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def without_marks(worked: str) -> str:
    """Return the sentences of a worked solution, without marks and without its last line, such as ``#### 18``."""
    return re.sub(r"<<[^<>]*>>", "", worked).partition("\n####")[0].strip()


def program_of(worked: str, answer: str) -> str | None:
    """Return Python code that prints ``answer``: one variable for each marked computation, below a comment that says
    what it is. None if there is no mark, if one is not plain arithmetic, or if the result differs.

    Example:
        >>> print(program_of("She sold 48/2 = <<48/2=24>>24 in May.\\nIn all, 48+24 = <<48+24=72>>72.\\n#### 72", "72"))
        # She sold .. in May
        a = 48/2
        # In all
        b = 48+a
        print(b)
    """
    lines: list[str] = []
    values: dict[str, float] = {}
    for sentence in worked.partition("\n####")[0].splitlines():
        pieces = _MARK.split(sentence)  # text, computation, text, computation, text
        for before, computation, after in zip(pieces[::2], pieces[1::2], pieces[2::2], strict=False):
            if len(values) == len(ascii_lowercase):
                return None
            # A number that an earlier line computed becomes its name; of equal numbers, the latest.
            names = {value: name for name, value in values.items()}
            code = _NUMBER.sub(lambda found, names=names: names.get(float(found[0]), found[0]), computation.strip())
            value = _compute(code, values)
            if value is None:
                return None
            name = ascii_lowercase[len(values)]
            values[name] = value
            said = (_FORMULA.sub("", _WRITTEN.sub("", before)), _WRITTEN.sub("", after) if after is pieces[-1] else "")
            comment = " .. ".join(stripped for part in said if (stripped := part.strip(" .,$%")))
            lines += [f"# {comment}"] * bool(comment) + [f"{name} = {code}"]
    try:
        is_right = bool(values) and abs(values[name] - float(answer.replace(",", ""))) < 1e-6
    except ValueError:
        return None
    return "\n".join([*lines, f"print({name})"]) if is_right else None


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
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, OverflowError):
        return None

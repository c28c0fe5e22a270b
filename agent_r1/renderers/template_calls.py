"""The methods that a chat template may call, and the costs of calls.

Each call of a method, of a Jinja filter or of a Jinja test uses up a part of the :class:`Budget` of a render.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.utils import Cycler

from agent_r1.renderers.template_budget import Budget, BudgetExceeded, check_percent_format, size_of

# fmt: off
METHODS: dict[type, frozenset[str]] = {
    str: frozenset({
        "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
        "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
        "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
        "strip", "swapcase", "title", "upper", "zfill",
    }),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    range: frozenset({"count", "index"}),
    int: frozenset({"as_integer_ratio", "bit_count", "bit_length", "conjugate"}),
    float: frozenset({"as_integer_ratio", "conjugate", "hex", "is_integer"}),
    LoopContext: frozenset({"changed", "cycle"}),
    Cycler: frozenset({"next", "reset"}),
}
"""The methods that templates can call on an object, by the type of the object.

Methods that return bytes are left out, because the limit on the characters of a render does not count bytes.
"""

_LINEAR = frozenset({
    "abs", "attr", "capitalize", "casefold", "copy", "count", "d", "default", "dictsort", "e", "endswith", "escape",
    "find", "first", "float", "get", "index", "int", "items", "keys", "last", "length", "list", "lower", "map", "max",
    "min", "partition", "reject", "rejectattr", "removeprefix", "removesuffix", "reverse", "safe", "select",
    "selectattr", "sort", "split", "splitlines", "startswith", "string", "swapcase", "title", "truncate", "unique",
    "upper", "values", "wordcount",
})
# fmt: on
"""Filters and methods that take about linear time, and whose result is at most a few times as long as all arguments
together."""

_QUADRATIC = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"})
"""Filters and methods that can compare each character of a text with each character of an argument."""

_STRINGIFYING = frozenset({"string", "tojson", "join", "format", "replace"})
"""Filters and methods that write all their arguments into one text. A call costs the length of the arguments as
text."""

# fmt: off
_TEXTUAL = frozenset({
    "capitalize", "center", "e", "escape", "forceescape", "indent", "lower", "safe", "title", "trim", "truncate",
    "upper", "urlencode", "wordcount",
})
# fmt: on
"""Filters that convert an input of another type to a text."""

_COLLECTING = frozenset({"groupby", "join", "max", "min", "sort", "sum", "unique"})
"""Filters and methods of a template that read all values of an iterator. The cost of a call depends on all these
values."""

_COMPARING = _COLLECTING | {"count", "dictsort", "index"}
"""Filters and methods that copy or compare the texts in a container. A call costs the length of these texts."""

_MAX_DIGITS = 100

_CHARACTERS_PER_STEP = 64
"""The number of characters of a text that a filter or method can read at the cost of one step.

The :class:`Budget` of a render limits the number of steps.
"""


def require_method(function: Any) -> Any:
    """Return the object to which a method is bound; None if ``function`` is not a method.

    Raises SecurityError if templates cannot call the method.
    """
    if not isinstance(function, MethodType | BuiltinMethodType):
        return None
    owner = function.__self__
    if not any(function.__name__ in METHODS.get(kind, ()) for kind in type(owner).__mro__):
        raise SecurityError(f"chat templates cannot call {function.__name__} of {type(owner).__name__}")
    return owner


def with_list(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments ``args`` of a call. ``name`` is the name of the called filter or method.

    If ``args[0]`` is an iterator and the call reads all items of the iterator, the result contains a list of the items
    in place of the iterator.
    """
    if name in _COLLECTING and args and not isinstance(args[0], str | list | tuple | dict):
        return (list(args[0]), *args[1:])
    return args


def spend_call(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Subtract the cost of a call from ``budget`` before the call runs.

    The call applies a filter to ``value``, or calls a method of ``value``. The argument ``name`` is the name of the
    filter or method.

    Raises:
        BudgetExceeded: the cost, or the possible length of the result, exceeds the rest of the budget.
        SecurityError: an argument, or the format string of the method ``format``, is not allowed in chat templates.
    """
    if name == "format" and isinstance(value, str):
        check_percent_format(value)
    if name == "map" and any(isinstance(each, list | dict) for each in (*args, *kwargs.values())):
        raise SecurityError("chat templates cannot use containers as defaults of map")
    if name == "round" and any(isinstance(each, int) and abs(each) > _MAX_DIGITS for each in (*args, *kwargs.values())):
        raise BudgetExceeded(f"it computes a number that is too large: round with more than {_MAX_DIGITS} digits")
    if name in _STRINGIFYING or (name in _TEXTUAL | _COMPARING and not isinstance(value, str)):
        budget.spend(1, size_of([value, args, kwargs], budget.limit_characters))
    budget.spend(steps_through(value))
    if name in _LINEAR:
        return
    length = len(value) if isinstance(value, str | list | tuple | dict) else 1
    factors = [abs(a) if isinstance(a, int | float) else len(a) for a in _numbers_and_texts((*args, *kwargs.values()))]
    factor = int(min(1 + max(factors, default=0), 1e18))
    if name in _QUADRATIC:
        texts = [len(each) for each in (*args, *kwargs.values()) if isinstance(each, str)]
        budget.spend(1, length * max(texts, default=0))
    else:
        budget.require(1 + (length + 1) * factor)
    if name in ("batch", "slice"):
        budget.spend(budget.nodes_of([*args, *kwargs.values()]) * factor)


def spend_scan(budget: Budget, value: Any) -> None:
    """Subtract the cost of one pass over ``value`` from the budget."""
    characters = size_of(value, budget.limit_characters) if isinstance(value, str | list | tuple) else 0
    budget.spend(steps_through(value), characters)


def spend_result(budget: Budget, result: Any) -> None:
    """Subtract the cost of the result of a call from the budget.

    Raises BudgetExceeded if the cost is larger than the remaining budget, or if the result is a very large integer.
    """
    if isinstance(result, int):
        budget.require_small(result)
    elif isinstance(result, str | list):
        budget.spend(steps_through(result), len(result))
    elif isinstance(result, dict):
        budget.spend(budget.nodes_of(result))


def steps_through(value: Any) -> int:
    """Return the number of steps that one pass over ``value`` costs."""
    length = len(value) if isinstance(value, str | list | tuple | dict | range) else 0
    return 1 + (length // _CHARACTERS_PER_STEP if isinstance(value, str) else length)


def _numbers_and_texts(value: Any) -> Iterator[int | float | str]:
    if isinstance(value, int | float | str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            if not isinstance(item, list | dict):
                yield from _numbers_and_texts(item)

"""The jinja2 environment that transformers gives to chat templates, with limits on the work of a template.

Every render has a :class:`~agent_r1.renderers.template_budget.Budget`. Each loop, call, operator, filter and output
subtracts its cost from the budget of the render. Some operations, such as loops and literals, cannot be intercepted in
jinja2. For these operations, filters that subtract the cost are added to the syntax tree of the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import local
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace, pass_context
from markupsafe import Markup

from agent_r1.renderers.template_budget import Budget, check_format_spec, size_of
from agent_r1.renderers.template_calls import require_method, spend_call, spend_result, spend_scan, with_list

_REMOVED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters that templates cannot use: ``random``, and formatting filters whose cost is not linear."""

_MAX_DATE_FORMAT = 1000

_NODES_PER_STEP = 8
"""How many syntax nodes together cost one step of the :class:`Budget`.

Each run of the body of a loop or macro costs 1 + (number of syntax nodes in the loop or macro) // _NODES_PER_STEP
steps.
"""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The jinja2 environment of transformers for chat templates. All work of a template is subtracted from a Budget."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would compute constants without counting the work
            finalize=_output,
            extensions=[_Generation, loopcontrols],
        )
        self._state = local()  # several threads can use one renderer
        self.macro_steps = 1
        self.filters = {name: self._counted(name, f) for name, f in self.filters.items()}
        self.filters["count"] = self.filters["length"]  # the method count has another cost
        self.tests = {name: self._counted_test(cast(Callable[..., Any], f)) for name, f in self.tests.items()}
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {"tojson": _tojson, _LOOP: _count_iterations, _CONCAT: _concat, _CONTAINER: _container}
        self.filters |= {_TEXT: _output, _SCANNED: _scanned}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"dict": _TemplateDict(), "namespace": _TemplateNamespace}

    @property
    def budget(self) -> Budget:
        budget: Budget = self._state.budget
        return budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._state.budget = budget

    def syntax_tree(self, source: str) -> nodes.Template:
        """Return the syntax tree of the template ``source``, as jinja2 parses the template."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        macros = template.find_all((nodes.Macro, nodes.CallBlock))
        self.macro_steps = max((_steps_of(macro) for macro in macros), default=1)
        _count_in(template)
        return template

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int | slice):  # an error message can contain the whole argument
            self.budget.spend(1, size_of(argument, self.budget.limit_characters))
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.allow_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.spend(__self.macro_steps if isinstance(__obj, Macro) else 1)
        if isinstance(__obj, LoopContext) and args:
            args = (_CountedIterable(args[0], budget, __self.macro_steps), *args[1:])
        elif (owner := require_method(__obj)) is not None:
            args = with_list(__obj.__name__, args)
            spend_call(budget, __obj.__name__, owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        spend_result(budget, result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe form of the method ``format`` or ``format_map`` of a text; None for any other object.

        The safe ``format`` raises SecurityError for a large width, such as ``{:9999}``. For each formatted value, the
        safe ``format`` also subtracts the number of characters from the :class:`Budget` of the render. The safe
        ``format_map`` always raises SecurityError.
        """
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        escaped = isinstance(text, Markup)
        formatter = _CountingEscapeFormatter(self, escape=text.escape) if escaped else _CountingFormatter(self)

        def format_text(*args: Any, **kwargs: Any) -> str:
            if value.__name__ != "format":
                raise SecurityError(f"chat templates cannot use {value.__name__}")
            self.budget.spend(1, len(text))
            return type(text)(formatter.vformat(text, args, kwargs))

        return format_text

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        context_kind = getattr(function, "jinja_pass_arg", None)  # set if the first argument is a context

        def counted(*args: Any, **kwargs: Any) -> Any:
            first, passed = (args[:0], args) if context_kind is None else (args[:1], args[1:])
            passed = with_list(name, passed)
            spend_call(self.budget, name, passed[0] if passed else "", passed[1:], kwargs)
            result = function(*first, *passed, **kwargs)
            spend_result(self.budget, result)
            return result

        if context_kind is not None:
            counted.__dict__["jinja_pass_arg"] = context_kind
        return counted

    def _counted_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # The cost grows with the length of the arguments, because a test may have to read each argument to the end.
        def counted(*args: Any) -> Any:
            for value in args:
                spend_scan(self.budget, value)
            return function(*args)

        context_kind = getattr(function, "jinja_pass_arg", None)
        if context_kind is not None:
            counted.__dict__["jinja_pass_arg"] = context_kind
        return counted


class _CountingFormatter(SandboxedFormatter):
    """The formatter of ``str.format`` in templates."""

    _env: LimitedEnvironment

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value, key = super().get_field(field_name, args, kwargs)
        budget = self._env.budget
        budget.spend(1, size_of(value, budget.limit_characters))
        return value, key

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_format_spec(format_spec)
        return super().format_field(value, format_spec)


class _CountingEscapeFormatter(_CountingFormatter, SandboxedEscapeFormatter):
    """The formatter of ``Markup.format``: a ``_CountingFormatter`` that also escapes the values."""


# ---- filters that are added to the syntax tree of a template

_LOOP, _CONCAT, _CONTAINER, _TEXT = "agent_r1_loop", "agent_r1_concat", "agent_r1_container", "agent_r1_text"
_SCANNED = "agent_r1_scanned"


@dataclass(frozen=True, slots=True, eq=False)
class _CountedIterable:
    """The items of ``_iterable``. For each item, ``_steps`` steps are subtracted from ``_budget``."""

    _iterable: Any
    _budget: Budget
    _steps: int

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._budget.spend(self._steps)
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


@pass_context
def _count_iterations(context: Any, iterable: Any, steps: int) -> _CountedIterable:
    iter(iterable)  # raises TypeError for a value that is not iterable, as a loop without a count does
    return _CountedIterable(iterable, context.environment.budget, steps)


@pass_context
def _concat(context: Any, values: list[Any]) -> str:
    budget = context.environment.budget
    budget.spend(1, size_of(values, budget.limit_characters))
    return "".join(map(str, values))


@pass_context
def _container(context: Any, value: Any) -> Any:
    budget = context.environment.budget
    budget.spend(budget.nodes_of(value))
    return value


@pass_context
def _scanned(context: Any, value: Any) -> Any:
    spend_scan(context.environment.budget, value)
    return value


@pass_context
def _output(context: Any, value: Any) -> str:
    budget = context.environment.budget
    budget.spend(1, len(value) if isinstance(value, str) else size_of(value, budget.limit_characters))
    return str(value)


def _steps_of(node: nodes.Node) -> int:
    return 1 + sum(1 for _ in node.find_all(nodes.Node)) // _NODES_PER_STEP


def _count_in(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _count_in(value)
            setattr(node, name, _counting(value))
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, nodes.Node):
                    _count_in(item)
            value[:] = [_counting(item) if isinstance(item, nodes.Node) else item for item in value]
    if isinstance(node, nodes.Operand) and not isinstance(node.expr, nodes.Const):
        node.expr = _filtered(node.expr, _SCANNED)
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node.node = _filtered(node.node, _SCANNED)
    elif isinstance(node, nodes.For):
        node.iter = _filtered(cast(nodes.Expr, node.iter), _LOOP, nodes.Const(_steps_of(node)))


def _counting(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)
    if isinstance(node, nodes.TemplateData):
        return _filtered(nodes.Const(node.data, lineno=node.lineno), _TEXT)
    is_literal = isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    return _filtered(node, _CONTAINER) if is_literal and isinstance(node, nodes.Expr) else node


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


# ---- functions and blocks that transformers gives to templates


class _Generation(Extension):
    """The block ``{% generation %}``, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    @staticmethod
    def fromkeys(*args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """A namespace of a template."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no parameter is named self, so a template can use this name
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot set {name!r} on a namespace: it begins with an underscore")


@pass_context
def _raise_exception(context: Any, message: Any) -> None:
    budget = context.environment.budget
    budget.spend(1, size_of(message, budget.limit_characters))
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if re.search(r"\d{3}", str(form)) or len(form) > _MAX_DATE_FORMAT:
        raise SecurityError("chat templates cannot use large widths in dates, or long formats of dates")
    return datetime.now().strftime(form)


@pass_context
def _tojson(
    context: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    budget = context.environment.budget
    width = indent if isinstance(indent, int) else len(indent or "")
    width = max(0, width) + sum(map(len, separators or ()))
    budget.spend(1, size_of(value, budget.limit_characters) * (1 + width))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

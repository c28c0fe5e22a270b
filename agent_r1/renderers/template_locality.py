"""Find out from the source of a chat template how far the text of a message can depend on other messages.

A chat template is *local* if the text that it writes for a conversation is

    opening + text of message 1 + text of message 2 + .. + ending,

and only the first few messages and a few neighbors can change the text of a message. So the text
of new messages at the end does not depend on the middle of the conversation. The renderer can render the new messages
with only a few earlier messages, and the time of a turn does not grow with the number of turns.

This module proves from the syntax tree of a template that the template is local. One loop over the messages has to
write the text. The body of this loop may read only the message, its neighbors, fixed messages at the beginning, and
whether the message is the first or the last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jinja2 import nodes

from agent_r1.core.messages import Message

_COMPARISONS = frozenset({"eq", "ne", "lt", "lteq", "gt", "gteq"})

_STATEFUL = frozenset({"caller", "cycler", "joiner", "self", "strftime_now", "super"})
"""Names that a template must not use if :class:`_Proof` is to prove that the template is local.

The value of such a name can change between two uses (``joiner``), or is a part of the template (``self``).
"""

# fmt: off
_ITERATORS = frozenset({
    "batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "unique",
})
"""Filters that return an iterator. If a variable holds an iterator, reading the variable uses up its items."""

_LOOP_VALUES = frozenset({
    "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0",
})
_LOOP_CALLS = frozenset({"changed", "cycle"})
"""The methods of ``loop`` that :class:`_Proof` accepts. For the loop over the messages, no method is accepted."""
# fmt: on

_UNKNOWN_EXPRESSIONS = (
    nodes.ContextReference,
    nodes.DerivedContextReference,
    nodes.EnvironmentAttribute,
    nodes.ExtensionAttribute,
    nodes.ImportedName,
    nodes.InternalName,
)


@dataclass(frozen=True, slots=True)
class Locality:
    """How far the text that a chat template writes for a message can depend on other messages.

    Attributes:
        first: how many messages at the beginning of the conversation can change the text of any message.
        near: how many messages directly before a message can change the text of the message. The same number of
            messages directly after the message can also change the text. The same number of messages at the end of the
            conversation can change the ending, which is the text after the last message.
    """

    first: int
    near: int

    def without_middle(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the first messages and the last messages of a conversation, without the messages between them.

        For a new message, the template writes the same text after the returned messages as after all ``messages``. If
        less than two thirds of the messages can be left out, return all ``messages``.
        """
        # The texts of the last ``near`` messages can change, and depend on ``near`` messages before them. The middle
        # begins and ends before an action, because a tool format can join adjacent messages of the user.
        actions = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if len(actions) <= self.first + 2 * self.near:
            return messages
        shortened = (*messages[: actions[self.first]], *messages[actions[-2 * self.near] :])
        return shortened if 3 * len(shortened) <= len(messages) else messages


def find_locality(template: nodes.Template) -> Locality | None:
    """Return how far the text of a message can depend on other messages; None if no limit can be proved."""
    proof = _Proof()
    try:
        proof.visit(template, _Place("top"))
    except _NotLocal:
        return None
    return Locality(proof.first + proof.shift, proof.near + proof.shift) if proof.is_after_loop else None


def lacks_one_part(short: str, whole: str) -> bool:
    """Return whether the text ``short`` results if one part is removed from the text ``whole``."""
    lengths = range(len(short) + 1)
    same = bisect_left(lengths, True, key=lambda length: not whole.startswith(short[:length])) - 1
    return len(short) <= len(whole) and whole.endswith(short[same:])


class _NotLocal(Exception):
    """Raised by :class:`_Proof` if a part of a template prevents the proof that the template is local."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a node in the syntax tree of a template.

    Attributes:
        part: "macro": the node is in a macro. "loop": the node is in the loop over the messages. "other": the node is
            in another loop, or in a block ``{% set name %}``. "top": the node is anywhere else. If several of the
            values fit, the first in the order of this list applies.
        in_inner_loop: whether the node is in a loop inside the macro, the loop or the block that ``part`` describes.
        is_later: whether the template never evaluates the node for the first message. Example: the node B in the
            expression ``loop.first or B``.
    """

    part: Literal["top", "loop", "other", "macro"]
    in_inner_loop: bool = False
    is_later: bool = False


class _Proof:
    """A proof that a chat template is local."""

    def __init__(self) -> None:
        self.first, self.near, self.shift, self.is_after_loop = 1, 1, 0, False
        self._conversations = {"messages"}  # the variables that stand for the messages from some index on
        self._names: set[str] = set()  # the names that were checked as names of other values

    def visit(self, node: nodes.Node, place: _Place) -> None:
        match node:
            case nodes.If():
                self._visit_if(node, place)
            case nodes.For():
                self._visit_for(node, place)
            case nodes.Macro():
                self._visit_all(node.iter_child_nodes(), _Place("macro"))
            case nodes.Assign(target=nodes.Name(name=name), node=value) if (start := self._start(value)) is not None:
                self._require(place.part == "top" and not self.is_after_loop)
                self._require(name not in self._names)  # a macro before this statement reads the new value too
                self._conversations.add(name)
                self.shift += start
            case nodes.Assign(node=value) | nodes.AssignBlock(filter=nodes.Filter() as value) if (
                place.part != "loop" and _has_iterator(value)
            ):
                raise _NotLocal
            case nodes.AssignBlock():
                self._visit_all(node.iter_child_nodes(), replace(place, part="other") if place.part == "top" else place)
            case nodes.Break():
                self._require(place.part != "loop" or place.in_inner_loop)
            case nodes.Template() | nodes.Output() | nodes.Assign() | nodes.Continue():
                self._visit_all(node.iter_child_nodes(), place)
            case nodes.Stmt():
                raise _NotLocal
            case _:
                self._visit_expression(node, place)

    def _visit_all(self, children: Iterable[nodes.Node], place: _Place) -> None:
        for child in children:
            self.visit(child, place)

    def _visit_if(self, node: nodes.If, place: _Place) -> None:
        self.visit(node.test, place)
        before, after = self.is_after_loop, []
        branches: list[Sequence[nodes.Node]] = [node.body, *([each] for each in node.elif_), node.else_]
        for branch in branches:
            self.is_after_loop = before
            self._visit_all(branch, place)
            after.append(self.is_after_loop)
        self.is_after_loop = any(after)

    def _visit_for(self, node: nodes.For, place: _Place) -> None:
        self._require(not node.recursive)
        start = self._start(node.iter)
        if start is not None:
            self._require(place.part == "top" and not self.is_after_loop and node.test is None)
            self.shift += start
            body = _Place("loop")
        else:
            self.visit(node.iter, place)
            self._require(place.part == "loop" or not _has_iterator(_iterated(node.iter)))
            body = replace(place, part="other") if place.part == "top" else replace(place, in_inner_loop=True)
        self._visit_all([node.target, *node.body], body)
        if node.test is not None:
            self.visit(node.test, place)  # in the condition of a loop, the name loop stands for the loop around it
        self.is_after_loop = self.is_after_loop or start is not None
        self._visit_all(node.else_, place)

    def _visit_expression(self, node: nodes.Node, place: _Place) -> None:
        in_loop = place.part == "loop" and not place.in_inner_loop
        match node:
            case nodes.Name(name=name):
                self._require(name != "loop" and name not in self._conversations and name not in _STATEFUL)
                self._names.add(name)
            case nodes.NSRef():  # a namespace keeps its values from one message to the next
                self._require(place.part in ("top", "other"))
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attribute) if in_loop:
                self._require(attribute in ("first", "last", "previtem", "nextitem"))
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attribute):
                self._require(attribute in _LOOP_VALUES and (place.in_inner_loop or place.part == "other"))
            case nodes.Call(node=nodes.Getattr(node=nodes.Name(name="loop"), attr=attribute)) if (
                attribute in _LOOP_CALLS and (place.in_inner_loop or place.part == "other")
            ):
                self._visit_all(node.iter_child_nodes(exclude=("node",)), place)
            case nodes.Compare(expr=left, ops=[nodes.Operand(op=op, expr=nodes.Const(value=int(value)))]) if (
                op in _COMPARISONS
                and (offset := 0 if self._is_length(left) else _offset(left) if in_loop else None) is not None
            ):
                self.first = max(self.first, value - offset + 1)
            case nodes.Getitem(node=nodes.Name(name=name), arg=index) if name in self._conversations:
                self._read(index, place, in_loop)
            case nodes.Or(left=left, right=right):
                self.visit(left, place)
                self.visit(right, replace(place, is_later=place.is_later or (in_loop and _is_first(left))))
            case nodes.Test(node=nodes.Name(name=name), name="defined") if name in self._conversations:
                pass
            case _:
                self._require(not isinstance(node, _UNKNOWN_EXPRESSIONS))
                self._visit_all(node.iter_child_nodes(), place)

    def _read(self, index: nodes.Node, place: _Place, in_loop: bool) -> None:
        match index, _offset(index):
            case nodes.Const(value=int(value)), _:
                self.first = max(self.first, value + 1)
            case nodes.Neg(node=nodes.Const(value=int(value))), _:
                self._require(place.part == "top" and self.is_after_loop)
                self.near = max(self.near, value)
            case _, int(offset):  # at the first message, messages[loop.index0 - 1] is the last message
                self._require(in_loop and (offset >= 0 or (offset == -1 and place.is_later)))
                self.near = max(self.near, abs(offset))
            case _:
                raise _NotLocal

    def _start(self, node: nodes.Node) -> int | None:
        match node:
            case nodes.Name(name=name) if name in self._conversations:
                return 0
            case nodes.Getitem(
                node=nodes.Name(name=name), arg=nodes.Slice(start=nodes.Const(value=int(start)), stop=None, step=None)
            ) if name in self._conversations:
                return start
        return None

    def _is_length(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Filter(node=nodes.Name(name=name), name="length" | "count"):
                return name in self._conversations
        return False

    def _require(self, is_local: bool) -> None:
        if not is_local:
            raise _NotLocal


def _has_iterator(node: nodes.Node) -> bool:
    filters = (each for each in (node, *node.find_all(nodes.Filter)) if isinstance(each, nodes.Filter))
    return any(each.name in _ITERATORS for each in filters)


def _iterated(node: nodes.Node) -> nodes.Node:
    while isinstance(node, nodes.Filter) and node.name in _ITERATORS - {"map"} and node.node is not None:
        node = node.node
    return node


def _offset(node: nodes.Node) -> int | None:
    # Return n if an expression equals ``loop.index0 + n``, otherwise None.
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="index0" | "index" as attribute):
            return int(attribute == "index")
        case nodes.Add(left=left, right=nodes.Const(value=int(value))) if (offset := _offset(left)) is not None:
            return offset + value
        case nodes.Sub(left=left, right=nodes.Const(value=int(value))) if (offset := _offset(left)) is not None:
            return offset - value
    return None


def _is_first(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="first"):
            return True
        case nodes.Compare(expr=left, ops=[nodes.Operand(op="eq", expr=nodes.Const(value=int(value)))]):
            return _offset(left) == value
        case nodes.Or(left=left, right=right):
            return _is_first(left) or _is_first(right)
    return False

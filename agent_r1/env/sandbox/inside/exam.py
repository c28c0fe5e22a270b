"""An exam: a candidate's process serves calls to its functions, the tests' process asks and compares.

Only None, booleans, numbers, text, bytes and containers of them cross, as exactly these types: an object that
pretends to be a number, or to equal everything, does not. Anything else stays where it is and is known by a number.
"""

import builtins
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 2**26  # bytes of one message


class Opaque:
    """Something that stayed in the other process. It can be handed back; it equals and tells nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _refuse(self, *others: Any) -> Any:
        raise TypeError("the candidate returned an object that is no plain data")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __iter__ = __hash__ = _refuse


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """The value as JSON can hold it; ``keep`` takes what is no plain data and gives its number."""
    if value is None or type(value) is bool:
        return value
    for kind, form in FORMS:
        if isinstance(value, kind):
            return form(value, keep)
    if isinstance(value, Opaque):
        return {"kept": value.number}
    return {"opaque": keep(value)}


def items(name: str) -> Callable[[Any, Any], Any]:
    return lambda value, keep: {name: [encode(item, keep) for item in value]}


def pairs(value: Any, keep: Callable[[Any], int]) -> Any:
    return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in dict.items(value)]}


FORMS: tuple[tuple[Any, Callable[[Any, Any], Any]], ...] = (
    (bool, lambda value, keep: bool(value)),
    (int, lambda value, keep: {"int": hex(int.__index__(value))}),
    (float, lambda value, keep: {"float": float.__repr__(value)}),
    (complex, lambda value, keep: {"complex": [repr(value.real), repr(value.imag)]}),
    (str, lambda value, keep: str.__str__(value)),
    ((bytes, bytearray), lambda value, keep: {"bytes": bytes(value).hex()}),
    (list, items("list")),
    (tuple, items("tuple")),
    (set, items("set")),
    (frozenset, items("frozenset")),
    (dict, pairs),
    ((type(iter(())), type(iter([])), map, filter, zip, reversed, type(letter for letter in "")), items("iterator")),
    (range, lambda value, keep: {"range": [value.start, value.stop, value.step]}),
)


def decode(data: Any, kept: Callable[[int], Any]) -> Any:
    """The inverse; ``kept`` gives what a number of this side stands for."""
    if not isinstance(data, dict):
        return data
    ((name, inner),) = data.items()
    if name == "kept":
        return kept(inner)
    if name == "dict":
        return {decode(key, kept): decode(item, kept) for key, item in inner}
    if name in MADE_OF_ITEMS:
        return MADE_OF_ITEMS[name](decode(item, kept) for item in inner)
    return SIMPLE[name](inner)


MADE_OF_ITEMS: dict[str, Callable[[Iterator[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": lambda found: iter(list(found)),
}
SIMPLE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(*map(float, parts)),
    "bytes": bytes.fromhex,
    "range": lambda bounds: range(*bounds),
    "opaque": Opaque,
}


def send(line: int, data: Any) -> None:
    text = json.dumps(data).encode()
    text = len(text).to_bytes(4, "little") + text
    while text:
        text = text[os.write(line, text) :]


def receive(line: int) -> Any:
    size = int.from_bytes(exactly(line, 4), "little")
    if size > LONGEST:
        raise ValueError("the other process sent too much")
    return json.loads(exactly(line, size))


def exactly(line: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(line, min(size - len(data), 1 << 20))
        if not more:
            raise EOFError("the other process is gone")
        data += more
    return data


def serve(line: int, source: str) -> None:
    """The candidate's side: runs its source, then serves calls to what it defines."""
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    names: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(source, "candidate.py", "exec", dont_inherit=True), names)
    send(line, {"defined": sorted(name for name in names if isinstance(name, str))})
    while True:
        try:
            request = receive(line)
        except EOFError:
            return
        try:
            args = [decode(arg, kept.__getitem__) for arg in request["args"]]
            keywords = {name: decode(arg, kept.__getitem__) for name, arg in request["keywords"].items()}
            reply: dict[str, Any] = {"returned": encode(names[request["name"]](*args, **keywords), keep)}
        except Exception as error:
            reply = {"raised": type(error).__name__, "says": str(error)[:1000]}
        send(line, reply)


def examine(line: int, setup: str, tests: str, calls: tuple[str, ...], nonce: str) -> None:
    """The tests' side: asks the candidate's process to run its functions, and compares here."""
    defined = receive(line)["defined"]
    missing = [name for name in calls if name not in defined]
    if missing:
        raise NameError(f"the candidate does not define {', '.join(missing)}")
    asked: list[str] = []
    sys.stdout = sys.stderr = io.StringIO()  # only the number is to be read, however much the tests print

    def remote(name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            asked.append(name)
            named = {key: encode(arg, refuse) for key, arg in keywords.items()}
            send(line, {"name": name, "args": [encode(arg, refuse) for arg in args], "keywords": named})
            reply = receive(line)
            if "raised" in reply:
                raise raised(reply)
            return decode(reply["returned"], refuse)

        return call

    remotes = {name: remote(name) for name in calls}
    names: dict[str, Any] = {"__name__": "tests"} | remotes
    exec(compile(setup, "setup.py", "exec", dont_inherit=True), names)
    names.update(remotes)  # where the setup has stubs of the same names
    exec(compile(tests, "tests.py", "exec", dont_inherit=True), names)
    if not asked:
        raise RuntimeError("the tests called nothing of the candidate's")
    os.write(2, nonce.encode())


ENDS_LOOPS = (StopIteration, StopAsyncIteration)


def raised(reply: dict[str, str]) -> Exception:
    """The builtin exception of that name, where it is one; only ordinary ones: nothing the candidate says can exit,
    or end a loop of the tests as a ``StopIteration`` would that comes out of ``map``.
    """
    kind = vars(builtins).get(reply["raised"])
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, ENDS_LOOPS):
        return RuntimeError(f"{reply['raised']}: {reply['says']}")
    try:
        return kind(reply["says"])
    except TypeError:
        return RuntimeError(f"{reply['raised']}: {reply['says']}")


def refuse(value: Any) -> Any:
    raise TypeError(f"{value!r:.80} is no plain data and cannot be sent to the candidate")

"""The two processes of the grader. One process runs the candidate: untrusted code that defines functions. The other
process runs the tests, which call these functions.

Arguments and results are sent as JSON. Plain values, dates and containers are sent as data. Types and pure functions
are sent by name. A result of any other type stays in the candidate's process, and only an index is sent. A result of a
subclass of ``list`` is sent as a plain list, because a subclass can define an ``__eq__`` that is always true. Each
process creates the received values itself, from a fixed list of types.

The candidate gets copies. If it changes a list or another container in place, the tests see the change only if the call
returns None or if its result is not used. Otherwise ``assert f(x) == sorted(x)`` would pass if the candidate emptied x.
"""

import builtins
import io
import itertools
import json
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from importlib import import_module  # for modules that are rarely needed and slow to import
from typing import Any

MAX_MESSAGE = 2**26  # bytes
MAX_RECURSION = 10_000  # of this module, which makes several calls per level of nesting


def run_deep(work: Callable[..., Any], *arguments: Any) -> Any:
    # The values can be deeply nested.
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, MAX_RECURSION))
    try:
        return work(*arguments)
    finally:
        sys.setrecursionlimit(before)


class Opaque:
    """A placeholder for an object of the untrusted code. The tests can only pass it back in a call."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _refuse(self, *others: Any) -> Any:
        raise TypeError("the candidate returned an object that is no plain data")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __iter__ = __hash__ = _refuse


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Return a value as JSON data. An object with no encoder becomes the index at which ``keep`` stores it."""

    def inner(value: Any) -> Any:
        if value is None or type(value) is bool:
            return value
        encoder = find_encoder(value)
        return {"opaque": keep(value)} if encoder is None else encoder(value, inner)

    return inner(value)


class AlteredArgument(Exception):
    """Raised if a test gives the untrusted code an argument that would change on its way to the other process."""


def encode_exactly(value: Any) -> Any:
    """Return a value as JSON data. Raise AlteredArgument if the decoded data would not equal the value."""
    if value is None or type(value) is bool:
        return value
    encoder = find_encoder(value)
    if encoder is None or not round_trips(value):
        reason = "which would arrive at the candidate as something else"
        raise AlteredArgument(f"the tests hand over {value!r:.80}, {reason}")
    return encoder(value, encode_exactly)


Encoder = Callable[[Any, Callable[[Any], Any]], Any]
"""A function ``encode(value, inner)`` that encodes a value. It encodes the elements of a container with ``inner``."""


def find_encoder(value: Any) -> Encoder | None:
    if type(value) in (type, type(len)):
        return (lambda value, inner: {"builtin": NAMED[value]}) if value in NAMED else None
    if type(value) in PLAIN:
        return PLAIN[type(value)]
    for kind, encoder in (*SPECIFIC_ENCODERS, *ENCODERS):
        if isinstance(value, kind if not isinstance(kind, LazyType) else kind.resolve()):
            return encoder
    return None


def round_trips(value: Any) -> bool:
    kind = type(value)
    if kind is defaultdict:
        return factory_name(value) is not None
    if kind in UNCHANGED:
        return True
    if any(kind is lazy.resolve() for lazy in WITH_TIME_ZONE):
        made = decode(find_encoder(value)(value, encode_exactly), refuse)  # type: ignore[misc]
        return (made.tzinfo, made.tzname()) == (value.tzinfo, value.tzname())
    return any(kind is lazy.resolve() for lazy in OTHER_UNCHANGED)


def encode_items(name: str) -> Encoder:
    return lambda value, inner: {name: [inner(item) for item in value]}


def encode_pairs(value: Any, inner: Callable[[Any], Any]) -> Any:
    return {"dict": [[inner(key), inner(item)] for key, item in dict.items(value)]}


FUNCTIONS: tuple[Any, ...] = (
    *(abs, all, any, ascii, bin, callable, chr, divmod, hash, hex, isinstance, issubclass, iter, len, max, min),
    *(next, oct, ord, pow, repr, round, sorted, sum),
)
TYPES = {kind: name for name, kind in vars(builtins).items() if isinstance(kind, type) and name[0] != "_"}
NAMED: dict[Any, str] = TYPES | {function: function.__name__ for function in FUNCTIONS}
"""The builtin types and pure functions that the tests and the candidate can exchange. Only their names are sent."""


def factory_name(value: Any) -> str | None:
    return next((name for name, kind in FACTORIES.items() if kind is value.default_factory), None)


def encode_defaultdict(value: Any, inner: Callable[[Any], Any]) -> Any:
    name, plain = factory_name(value), encode_pairs(value, inner)
    return plain if name is None else {"defaultdict": [name, plain]}


def encode_numpy_scalar(value: Any, inner: Callable[[Any], Any]) -> Any:
    # item() would return a longdouble unchanged; it is rounded to a float
    convert = {"f": float, "c": complex}.get(value.dtype.kind)
    return inner(value.item() if convert is None else convert(value))


FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)}


class LazyType:
    """A type of a module that need not be imported."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def resolve(self) -> Any:
        # ``isinstance(value, ())`` is False for every value.
        return vars(sys.modules[self.module]).get(self.name, ()) if self.module in sys.modules else ()


def encode_time(kind: str) -> Encoder:
    return lambda value, inner: {kind: [value.isoformat(), value.fold]}


EMPTY: dict[Any, Any] = {}
ITERABLES: tuple[Any, ...] = (
    *((), [], EMPTY, EMPTY.values(), EMPTY.items(), set()),
    *("", "é", b"", range(0), range(1 << 70)),
)

ITERATORS = (
    *(type(iter(iterable)) for iterable in ITERABLES),
    *(map, filter, zip, enumerate, reversed, type(reversed([])), type(reversed(EMPTY)), type(letter for letter in "")),
    *(itertools.accumulate, itertools.chain, itertools.combinations, itertools.combinations_with_replacement),
    *(itertools.compress, itertools.dropwhile, itertools.filterfalse, itertools.groupby, itertools.islice),
    *(itertools.pairwise, itertools.permutations, itertools.product, itertools.starmap, itertools.takewhile),
    itertools.zip_longest,
)
"""Iterators that end if their input ends. ``count``, ``cycle`` and ``repeat`` are left out: they can be endless."""

KEYS, VALUES, ITEMS = type(EMPTY.keys()), type(EMPTY.values()), type(EMPTY.items())

FRACTION, DECIMAL = LazyType("fractions", "Fraction"), LazyType("decimal", "Decimal")
DATETIME, TIME = WITH_TIME_ZONE = (LazyType("datetime", "datetime"), LazyType("datetime", "time"))
DATE, DURATION = LazyType("datetime", "date"), LazyType("datetime", "timedelta")
OTHER_UNCHANGED = (FRACTION, DECIMAL, DATE, DURATION)

SPECIFIC_ENCODERS: tuple[tuple[Any, Encoder], ...] = (
    (Opaque, lambda value, inner: {"kept": value.number}),
    (LazyType("numpy", "generic"), encode_numpy_scalar),
    (LazyType("numpy", "ndarray"), lambda value, inner: inner(value.tolist())),
    (FRACTION, lambda value, inner: {"fraction": [hex(value.numerator), hex(value.denominator)]}),
    (DECIMAL, lambda value, inner: {"decimal": str(value)}),
    (DATETIME, encode_time("datetime")),
    (DATE, lambda value, inner: {"date": value.isoformat()}),
    (TIME, encode_time("time")),
    (DURATION, lambda value, inner: {"timedelta": [value.days, value.seconds, value.microseconds]}),
    (Counter, lambda value, inner: {"counter": encode_pairs(value, inner)}),
    (OrderedDict, lambda value, inner: {"ordered": encode_pairs(value, inner)}),
    (defaultdict, encode_defaultdict),
    (deque, lambda value, inner: {"deque": [[inner(item) for item in value], value.maxlen]}),
    (KEYS, encode_items("keys")),
    (VALUES, encode_items("values")),
    (ITEMS, encode_items("items")),
    (bytearray, lambda value, inner: {"bytearray": bytes(value).hex()}),
    (memoryview, lambda value, inner: {"bytes": bytes(value).hex()}),
)
"""Pairs (type, encoder) that are tried before ENCODERS. Otherwise, a Counter would be encoded as a plain dict."""

ENCODERS: tuple[tuple[Any, Encoder], ...] = (
    (bool, lambda value, inner: bool(value)),
    (int, lambda value, inner: {"int": hex(int.__index__(value))}),
    (float, lambda value, inner: {"float": float.__repr__(value)}),
    (complex, lambda value, inner: {"complex": [repr(value.real), repr(value.imag)]}),
    (str, lambda value, inner: str.__str__(value)),
    (bytes, lambda value, inner: {"bytes": bytes(value).hex()}),
    (list, encode_items("list")),
    (tuple, encode_items("tuple")),
    (set, encode_items("set")),
    (frozenset, encode_items("frozenset")),
    (dict, encode_pairs),
    (ITERATORS, encode_items("iterator")),
    (range, lambda value, inner: {"range": [value.start, value.stop, value.step]}),
)

PLAIN: dict[Any, Encoder] = {kind: encoder for kind, encoder in ENCODERS if kind is not ITERATORS}

UNCHANGED: frozenset[Any] = frozenset(
    {*PLAIN, bytearray, deque, Counter, OrderedDict, KEYS, VALUES, ITEMS, Opaque, *ITERATORS, type, type(len)}
)
"""Types whose values stay equal when encoded and decoded. A decoded iterator counts as equal if it has equal values."""


def decode(data: Any, kept: Callable[[int], Any]) -> Any:
    """Return the value that ``data`` encodes. ``{"kept": 3}`` encodes ``kept(3)``, an object kept in this process."""
    if not isinstance(data, dict):
        return data
    ((name, inner),) = data.items()
    if name == "kept":
        return kept(inner)
    if name == "dict":
        return {decode(key, kept): decode(item, kept) for key, item in inner}
    if name in DECODE_PAIRS:
        return DECODE_PAIRS[name](decode(inner, kept))
    if name == "defaultdict":
        return defaultdict(FACTORIES[inner[0]], decode(inner[1], kept))
    if name == "deque":
        return deque((decode(item, kept) for item in inner[0]), inner[1])
    if name in DECODE_ITEMS:
        return DECODE_ITEMS[name](decode(item, kept) for item in inner)
    return DECODE[name](inner)


DECODE_ITEMS: dict[str, Callable[[Iterator[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": lambda values: iter(list(values)),
    "keys": lambda values: dict.fromkeys(values).keys(),
    "values": lambda values: dict(enumerate(values)).values(),
    "items": lambda values: dict(values).items(),
}
DECODE_PAIRS: dict[str, Callable[[dict[Any, Any]], Any]] = {"counter": Counter, "ordered": OrderedDict}


def decode_dates(name: str) -> Callable[[Any], Any]:
    def decode_date(data: Any) -> Any:
        import datetime

        kind = vars(datetime)[name]
        if name == "timedelta":
            return kind(*data)
        if name == "date":
            return kind.fromisoformat(data)
        text, fold = data
        return kind.fromisoformat(text).replace(fold=fold)

    return decode_date


DECODE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(*map(float, parts)),
    "bytes": bytes.fromhex,
    "range": lambda bounds: range(*bounds),
    "bytearray": bytearray.fromhex,
    "fraction": lambda parts: import_module("fractions").Fraction(*(int(part, 16) for part in parts)),
    "decimal": lambda text: import_module("decimal").Decimal(text),
    **{name: decode_dates(name) for name in ("datetime", "date", "time", "timedelta")},
    "opaque": Opaque,
    "builtin": {name: value for value, name in NAMED.items()}.__getitem__,
}


def send(connection: int, data: Any) -> None:
    text = run_deep(json.dumps, data).encode()
    text = len(text).to_bytes(4, "little") + text
    while text:
        text = text[os.write(connection, text) :]


def receive(connection: int) -> Any:
    size = int.from_bytes(read_exactly(connection, 4), "little")
    if size > MAX_MESSAGE:
        raise ValueError("the other process sent too much")
    return run_deep(json.loads, read_exactly(connection, size))


def read_exactly(connection: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(connection, min(size - len(data), 1 << 20))
        if not more:
            raise EOFError("the other process is gone")
        data += more
    return data


def serve(connection: int, source: str) -> None:
    """Run the untrusted ``source``. Then call a function of it for each request of the tests' process."""
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    names: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(source, "candidate.py", "exec", dont_inherit=True), names)
    send(connection, {"defined": sorted(name for name in names if isinstance(name, str))})
    while True:
        try:
            request = receive(connection)
        except EOFError:
            return
        try:
            args = [run_deep(decode, arg, kept.__getitem__) for arg in request["args"]]
            keywords = {name: run_deep(decode, arg, kept.__getitem__) for name, arg in request["keywords"].items()}
            returned = names[request["name"]](*args, **keywords)
            reply: dict[str, Any] = {"returned": run_deep(encode, returned, keep)}
            if returned is None or request["in_place"]:
                values = [*args, *keywords.values()]
                reply["left"] = [run_deep(encode, value, keep) if type(value) in IN_PLACE else None for value in values]
        except Exception as error:
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "message": str(error)[:1000]}
        send(connection, reply)


def run_tests(connection: int, setup: str, tests: str, calls: tuple[str, ...], nonce: str) -> None:
    """Run the tests. Functions with a name in ``calls`` run in the candidate's process.

    If all tests pass, stderr ends with ``nonce``, a secret text. If the tests are faulty, it ends with ``nonce`` and a
    reason. If the candidate fails, ``nonce`` is not written.
    """
    defined = receive(connection)["defined"]
    missing = [name for name in calls if name not in defined]
    if missing:
        raise NameError(f"the candidate does not define {', '.join(missing)}")
    called: list[str] = []
    sys.stdout = sys.stderr = io.StringIO()  # so that the output limit never cuts off the nonce

    def encode_argument(arg: Any) -> Any:
        try:
            return run_deep(encode_exactly, arg)
        except AlteredArgument as error:
            os.write(2, f"{nonce} {error}".encode("utf-8", "replace"))
            os._exit(1)  # the tests could catch an exception

    def remote(name: str, in_place: bool) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            called.append(name)
            encoded = [encode_argument(arg) for arg in args], {k: encode_argument(arg) for k, arg in keywords.items()}
            send(connection, {"name": name, "args": encoded[0], "keywords": encoded[1], "in_place": in_place})
            reply = receive(connection)
            if "raised" in reply:
                raise make_exception(reply)
            returned = run_deep(decode, reply["returned"], refuse)
            if returned is None or in_place:  # checked here, because the candidate can write any reply
                for value, left in zip((*args, *keywords.values()), reply["left"], strict=True):
                    put_back(value, run_deep(decode, left, refuse))
            return returned

        return call

    remotes = {name: remote(name, False) for name in calls} | {name + UNUSED: remote(name, True) for name in calls}
    names: dict[str, Any] = {"__name__": "tests"} | remotes
    exec(compile(setup, "setup.py", "exec", dont_inherit=True), names)
    names.update(remotes)  # the setup can define other functions with the same names
    exec(compile(mark_unused(tests, calls), "tests.py", "exec", dont_inherit=True), names)
    if not called:
        raise RuntimeError("the tests called nothing of the candidate's")
    os.write(2, nonce.encode())


IN_PLACE: frozenset[Any] = frozenset({list, dict, set, deque, bytearray, Counter, OrderedDict, defaultdict})


def put_back(value: Any, left: Any) -> None:
    """Give a container of the tests the content that the candidate left in its copy."""
    if type(value) in IN_PLACE and type(left) is type(value):
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(left)


UNUSED = " (result unused)"  # no name in Python source contains a space


def mark_unused(tests: str, calls: tuple[str, ...]) -> Any:
    """Return the tests as a syntax tree in which ``f(x)``, as a statement, calls the function named "f" + UNUSED."""
    ast = import_module("ast")
    tree = ast.parse(tests, "tests.py")
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            node.value.func.id += UNUSED if node.value.func.id in calls else ""
    return tree


ENDS_LOOPS = (StopIteration, StopAsyncIteration)


def make_exception(reply: dict[str, Any]) -> Exception:
    """Return an exception of the type that the candidate raised, or of the nearest builtin parent type."""
    # SystemExit would end the process of the tests, and StopIteration would end a loop. Both become RuntimeError.
    known = (vars(builtins).get(name) for name in reply["raised"])
    kind = next((kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseException)), BaseException)
    if not issubclass(kind, Exception) or issubclass(kind, ENDS_LOOPS):
        return RuntimeError(f"{reply['raised'][0]}: {reply['message']}")
    try:
        return kind(reply["message"])
    except TypeError:
        return RuntimeError(f"{reply['raised'][0]}: {reply['message']}")


def refuse(value: Any) -> Any:
    raise TypeError(f"{value!r:.80} is nothing of the tests' that the candidate could give back")

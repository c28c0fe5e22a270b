"""An exam: a candidate's process serves calls to its functions, the tests' process asks and compares.

Only None, booleans, numbers, text, bytes, dates and containers of them cross, as exactly these types: an object that
pretends to be a number, or to equal everything, does not. Anything else stays where it is and is known by a number.
What crosses is JSON: each side makes the values itself, by name out of a fixed list. What tests hand over has to arrive
as exactly what it is, else nothing is known of the candidate.
"""

import builtins
import io
import itertools
import json
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 2**26  # bytes of one message
DEEPEST = 10_000  # calls of ours within each other, some for each level of what is sent; a candidate has Python's limit


def deeply(work: Callable[..., Any], *given: Any) -> Any:
    """What ``work`` gives, where values may be nested deeper than calls may be."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEPEST))
    try:
        return work(*given)
    finally:
        sys.setrecursionlimit(before)


class Opaque:
    """Something that stayed in the other process. It can be handed back; it equals and tells nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _refuse(self, *others: Any) -> Any:
        raise TypeError("the candidate returned an object that is no plain data")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __iter__ = __hash__ = _refuse


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """The value as JSON can hold it; ``keep`` takes what is no plain data and gives its number."""

    def inner(value: Any) -> Any:
        if value is None or type(value) is bool:
            return value
        form = form_of(value)
        return {"opaque": keep(value)} if form is None else form(value, inner)

    return inner(value)


class Altered(Exception):
    """An argument that would arrive at the candidate as something else."""


def encode_exactly(value: Any) -> Any:
    """The value as JSON can hold it, where what is made of that is the same. Raises Altered where it is not."""
    if value is None or type(value) is bool:
        return value
    form = form_of(value)
    if form is None or not arrives(value):
        raise Altered(f"the tests hand over {value!r:.80}, which would arrive at the candidate as something else")
    return form(value, encode_exactly)


Form = Callable[[Any, Callable[[Any], Any]], Any]
"""How a value is written; the second argument writes what is in it."""


def form_of(value: Any) -> Form | None:
    if type(value) in PLAIN:
        return PLAIN[type(value)]
    for kind, form in (*ELSEWHERE, *FORMS):
        if isinstance(value, kind if not isinstance(kind, Named) else kind.there()):
            return form
    return None


def arrives(value: Any) -> bool:
    """Whether what is made of a value that has a form is of the same type, and does the same."""
    kind = type(value)
    if kind is defaultdict:
        return maker(value) is not None
    if kind in AS_IT_IS:
        return True
    if any(kind is named.there() for named in ZONED):
        made = decode(form_of(value)(value, encode_exactly), refuse)  # type: ignore[misc]
        return (made.tzinfo, made.tzname()) == (value.tzinfo, value.tzname())
    return any(kind is named.there() for named in NAMED)


def items(name: str) -> Form:
    return lambda value, inner: {name: [inner(item) for item in value]}


def pairs(value: Any, inner: Callable[[Any], Any]) -> Any:
    return {"dict": [[inner(key), inner(item)] for key, item in dict.items(value)]}


def maker(value: Any) -> str | None:
    return next((name for name, kind in FACTORIES.items() if kind is value.default_factory), None)


def factory(value: Any, inner: Callable[[Any], Any]) -> Any:
    """A dictionary that makes what it lacks, where that is done by a type; else it is a plain one."""
    made_by, plain = maker(value), pairs(value, inner)
    return plain if made_by is None else {"defaultdict": [made_by, plain]}


def scalar(value: Any, inner: Callable[[Any], Any]) -> Any:
    """A number of numpy's; those that are longer than Python's give themselves as an item."""
    made = {"f": float, "c": complex}.get(value.dtype.kind)
    return inner(value.item() if made is None else made(value))


FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)}


class Named:
    """A type of a module that need not be imported: where it is not, there can be no value of it."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def there(self) -> Any:
        return vars(sys.modules[self.module]).get(self.name, ()) if self.module in sys.modules else ()


def clocked(kind: str) -> Form:
    return lambda value, inner: {kind: [value.isoformat(), value.fold]}


EMPTY: dict[Any, Any] = {}
GONE_OVER: tuple[Any, ...] = (
    (),
    [],
    EMPTY,
    EMPTY.values(),
    EMPTY.items(),
    set(),
    "",
    "é",
    b"",
    range(0),
    range(1 << 70),
)

ITERATORS = (
    *(type(iter(some)) for some in GONE_OVER),
    *(map, filter, zip, enumerate, reversed, type(reversed([])), type(reversed(EMPTY)), type(letter for letter in "")),
    *(itertools.accumulate, itertools.chain, itertools.combinations, itertools.combinations_with_replacement),
    *(itertools.compress, itertools.dropwhile, itertools.filterfalse, itertools.groupby, itertools.islice),
    *(itertools.pairwise, itertools.permutations, itertools.product, itertools.starmap, itertools.takewhile),
    itertools.zip_longest,
)
"""Those that end if what they go over does; ``count``, ``cycle`` and ``repeat`` stay where they are."""

KEYS, VALUES, ITEMS = type(EMPTY.keys()), type(EMPTY.values()), type(EMPTY.items())

FRACTION, DECIMAL = Named("fractions", "Fraction"), Named("decimal", "Decimal")
DATETIME, TIME = ZONED = (Named("datetime", "datetime"), Named("datetime", "time"))
DATE, DURATION = Named("datetime", "date"), Named("datetime", "timedelta")
NAMED = (FRACTION, DECIMAL, DATE, DURATION)

ELSEWHERE: tuple[tuple[Any, Form], ...] = (
    (Opaque, lambda value, inner: {"kept": value.number}),
    (Named("numpy", "generic"), scalar),
    (Named("numpy", "ndarray"), lambda value, inner: inner(value.tolist())),
    (FRACTION, lambda value, inner: {"fraction": [hex(value.numerator), hex(value.denominator)]}),
    (DECIMAL, lambda value, inner: {"decimal": str(value)}),
    (DATETIME, clocked("datetime")),
    (DATE, lambda value, inner: {"date": value.isoformat()}),
    (TIME, clocked("time")),
    (DURATION, lambda value, inner: {"timedelta": [value.days, value.seconds, value.microseconds]}),
    (Counter, lambda value, inner: {"counter": pairs(value, inner)}),
    (OrderedDict, lambda value, inner: {"ordered": pairs(value, inner)}),
    (defaultdict, factory),
    (deque, lambda value, inner: {"deque": [[inner(item) for item in value], value.maxlen]}),
    (KEYS, items("keys")),
    (VALUES, items("values")),
    (ITEMS, items("items")),
    (bytearray, lambda value, inner: {"bytearray": bytes(value).hex()}),
    (memoryview, lambda value, inner: {"bytes": bytes(value).hex()}),
)
"""Types that have another among their parents: looked for before those."""

FORMS: tuple[tuple[Any, Form], ...] = (
    (bool, lambda value, inner: bool(value)),
    (int, lambda value, inner: {"int": hex(int.__index__(value))}),
    (float, lambda value, inner: {"float": float.__repr__(value)}),
    (complex, lambda value, inner: {"complex": [repr(value.real), repr(value.imag)]}),
    (str, lambda value, inner: str.__str__(value)),
    (bytes, lambda value, inner: {"bytes": bytes(value).hex()}),
    (list, items("list")),
    (tuple, items("tuple")),
    (set, items("set")),
    (frozenset, items("frozenset")),
    (dict, pairs),
    (ITERATORS, items("iterator")),
    (range, lambda value, inner: {"range": [value.start, value.stop, value.step]}),
)

PLAIN: dict[Any, Form] = {kind: form for kind, form in FORMS if kind is not ITERATORS}
"""What most values are, found at once."""

AS_IT_IS: frozenset[Any] = frozenset(
    {*PLAIN, bytearray, deque, Counter, OrderedDict, KEYS, VALUES, ITEMS, Opaque, *ITERATORS}
)
"""Types that are made again as themselves; iterators as one that yields the same."""


def decode(data: Any, kept: Callable[[int], Any]) -> Any:
    """The inverse; ``kept`` gives what a number of this side stands for."""
    if not isinstance(data, dict):
        return data
    ((name, inner),) = data.items()
    if name == "kept":
        return kept(inner)
    if name == "dict":
        return {decode(key, kept): decode(item, kept) for key, item in inner}
    if name in MADE_OF_PAIRS:
        return MADE_OF_PAIRS[name](decode(inner, kept))
    if name == "defaultdict":
        return defaultdict(FACTORIES[inner[0]], decode(inner[1], kept))
    if name == "deque":
        return deque((decode(item, kept) for item in inner[0]), inner[1])
    if name in MADE_OF_ITEMS:
        return MADE_OF_ITEMS[name](decode(item, kept) for item in inner)
    return SIMPLE[name](inner)


MADE_OF_ITEMS: dict[str, Callable[[Iterator[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": lambda found: iter(list(found)),
    "keys": lambda found: dict.fromkeys(found).keys(),
    "values": lambda found: dict(enumerate(found)).values(),
    "items": lambda found: dict(found).items(),
}
MADE_OF_PAIRS: dict[str, Callable[[dict[Any, Any]], Any]] = {"counter": Counter, "ordered": OrderedDict}


def fraction(parts: Any) -> Any:
    from fractions import Fraction  # these are slow to import, and rare

    return Fraction(*(int(part, 16) for part in parts))


def decimal(text: str) -> Any:
    from decimal import Decimal

    return Decimal(text)


def of_dates(name: str) -> Callable[[Any], Any]:
    def made(told: Any) -> Any:
        import datetime

        kind = vars(datetime)[name]
        if name == "timedelta":
            return kind(*told)
        if name == "date":
            return kind.fromisoformat(told)
        text, fold = told
        return kind.fromisoformat(text).replace(fold=fold)

    return made


SIMPLE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(*map(float, parts)),
    "bytes": bytes.fromhex,
    "range": lambda bounds: range(*bounds),
    "bytearray": bytearray.fromhex,
    "fraction": fraction,
    "decimal": decimal,
    **{name: of_dates(name) for name in ("datetime", "date", "time", "timedelta")},
    "opaque": Opaque,
}


def send(line: int, data: Any) -> None:
    text = deeply(json.dumps, data).encode()
    text = len(text).to_bytes(4, "little") + text
    while text:
        text = text[os.write(line, text) :]


def receive(line: int) -> Any:
    size = int.from_bytes(exactly(line, 4), "little")
    if size > LONGEST:
        raise ValueError("the other process sent too much")
    return deeply(json.loads, exactly(line, size))


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
            args = [deeply(decode, arg, kept.__getitem__) for arg in request["args"]]
            keywords = {name: deeply(decode, arg, kept.__getitem__) for name, arg in request["keywords"].items()}
            returned = names[request["name"]](*args, **keywords)
            reply: dict[str, Any] = {"returned": deeply(encode, returned, keep)}
        except Exception as error:
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "says": str(error)[:1000]}
        send(line, reply)


def examine(line: int, setup: str, tests: str, calls: tuple[str, ...], nonce: str) -> None:
    """The tests' side: asks the candidate's process to run its functions, and compares here.

    Its last word is the number, where all held; the number and a reason, where the tests cannot be asked at all.
    """
    defined = receive(line)["defined"]
    missing = [name for name in calls if name not in defined]
    if missing:
        raise NameError(f"the candidate does not define {', '.join(missing)}")
    asked: list[str] = []
    sys.stdout = sys.stderr = io.StringIO()  # only the number is to be read, however much the tests print

    def sendable(arg: Any) -> Any:
        try:
            return deeply(encode_exactly, arg)
        except Altered as error:
            os.write(2, f"{nonce} {error}".encode("utf-8", "replace"))
            os._exit(1)  # here, as tests may catch whatever is raised

    def remote(name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            asked.append(name)
            named = {key: sendable(arg) for key, arg in keywords.items()}
            send(line, {"name": name, "args": [sendable(arg) for arg in args], "keywords": named})
            reply = receive(line)
            if "raised" in reply:
                raise raised(reply)
            return deeply(decode, reply["returned"], refuse)

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


def raised(reply: dict[str, Any]) -> Exception:
    """The builtin exception that it is, or derives from first, as its names say; only ordinary ones: nothing the
    candidate says can exit, or end a loop of the tests as a ``StopIteration`` would that comes out of ``map``.
    """
    known = (vars(builtins).get(name) for name in reply["raised"])
    kind = next((kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseException)), BaseException)
    if not issubclass(kind, Exception) or issubclass(kind, ENDS_LOOPS):
        return RuntimeError(f"{reply['raised'][0]}: {reply['says']}")
    try:
        return kind(reply["says"])
    except TypeError:
        return RuntimeError(f"{reply['raised'][0]}: {reply['says']}")


def refuse(value: Any) -> Any:
    raise TypeError(f"{value!r:.80} is nothing of the tests' that the candidate could give back")

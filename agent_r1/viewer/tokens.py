"""The action tokens of an attempt with their numbers, such as log-probabilities and advantages, and colors for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agent_r1.core.events import TokenRecord
from agent_r1.core.trajectory import Turn
from agent_r1.viewer.text import number

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token. A number that was not recorded, or is not finite, is None."""

    id: int
    text: str
    engine: float | None  # the log-probability in the engine that sampled the token
    trainer: float | None  # the log-probability in the trainer before the update
    gap: float | None  # ``trainer`` minus ``engine``
    advantage: float | None
    weight: float | None  # the weight of the token in the policy loss. 0: the loss leaves the token out
    entropy: float | None
    value: float | None  # the value before the token, by the critic or by continuations


NUMBERS: Mapping[str, Callable[[Token], float | None]] = {
    name: attrgetter(name) for name in ("engine", "trainer", "gap", "advantage", "weight", "entropy", "value")
}
"""The numbers of a token, in the order in which pages and tables show them."""


def make_tokens(turn: Turn, record: TokenRecord | None, tokenizer: Tokenizer | None) -> Iterator[Token]:
    """Yield the action tokens of a turn. Without a ``record``, only ``engine`` is known."""
    unknown = (math.nan,) * len(turn.action_ids)
    columns = (unknown,) * 5
    if record is not None:
        values = record.values or unknown
        columns = (record.logprobs, record.advantages, record.loss_weights, record.entropies, values)
    texts = token_texts(turn.action_ids, tokenizer)
    for token_id, text, engine, trainer, advantage, weight, entropy, value in zip(
        turn.action_ids, texts, turn.logprobs, *columns, strict=True
    ):
        numbers = (engine, trainer, trainer - engine, advantage, weight, entropy, value)
        yield Token(token_id, text, *(one if math.isfinite(one) else None for one in numbers))


def find_tokenizer(folder: Path, model: Path | None) -> Path | None:
    """Return the path of a run's ``tokenizer.json``, or None."""
    checkpoints = sorted(folder.glob(f"checkpoints/step-*/{TOKENIZER}"))
    candidates = [folder / "model" / TOKENIZER, *checkpoints[-1:], *([model / TOKENIZER] if model else [])]
    return next(filter(Path.is_file, candidates), None)


def load_tokenizer(file: Path | None) -> Tokenizer | None:
    """Load a tokenizer. Return None if there is no file, or if it cannot be read."""
    try:
        return None if file is None else Tokenizer.from_file(str(file))
    except Exception:  # the package raises Exception if a file cannot be read
        return None


def token_texts(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return the text of each token. Without a tokenizer, and for unknown ids, the text is the id, such as "⟨151⟩".

    If several tokens make one character, the last token has the character, and the others have "·".
    """
    if tokenizer is None:
        return [f"⟨{one}⟩" for one in ids]
    stream = DecodeStream(skip_special_tokens=False)
    texts = []
    for one in ids:
        try:
            text = stream.step(tokenizer, one)
        except Exception:  # the package raises Exception for ids out of range
            stream, text = DecodeStream(skip_special_tokens=False), f"⟨{one}⟩"
        texts.append("·" if text is None else text)
    return texts


@dataclass(frozen=True, slots=True)
class Scale:
    """A color scale for one number of tokens. Each value gets a level with a color."""

    code: str  # the letter of the CSS classes. The class ``a7`` is level 7 of the scale ``a``
    name: str  # the key of the number in ``NUMBERS``
    title: str
    meaning: str  # the explanation in the legend
    diverging: bool  # True: levels 0 to 8, with 4 for the value 0. False: levels 0 to 4 for the absolute value
    # the largest absolute value on the scale. A value beyond the scale gets the last level, or the first level if
    # ``diverging`` is true and the value is negative
    largest: float = 0.0

    def level(self, token: Token) -> int | None:
        """Return the level, which determines the color; None if the number of the token is not known."""
        value = NUMBERS[self.name](token)
        if value is None:
            return None
        share = value / self.largest if self.largest else 0.0
        if self.diverging:
            return 4 + round(4 * max(-1.0, min(1.0, share)))
        return round(4 * max(0.0, min(1.0, abs(share))))

    @property
    def marks(self) -> tuple[tuple[int, str], ...]:
        """The entries of the legend: pairs (level, value as text)."""
        if not self.largest:
            return ((4 if self.diverging else 0, "0"),)
        if self.diverging:
            return tuple((level, number((level - 4) / 4 * self.largest, 3)) for level in range(9))
        sign = -1 if self.name == "engine" else 1
        return ((0, "0"), *((level, number(sign * level / 4 * self.largest, 3)) for level in range(1, 5)))


_SCALES = (
    Scale("a", "advantage", "Advantage", "orange: its probability is lowered; blue: it is raised", True),
    Scale("g", "gap", "Log-probability gap", "trainer minus engine", True),
    Scale("l", "engine", "Log-probability", "of the engine; darker tokens were less likely", False),
    Scale("e", "entropy", "Entropy", "of the policy at the token, in nats", False),
    Scale("v", "value", "Value", "before the token", True),
)


def make_scales(tokens: Sequence[Token], advantages: Iterable[float] = ()) -> tuple[Scale, ...]:
    """Return a color scale for each number that is known for a token.

    ``advantages`` are those of the whole group: the strongest color stands for the largest of them, also if it is on
    another page.
    """
    scales = []
    for scale in _SCALES:
        known = [abs(value) for token in tokens if (value := NUMBERS[scale.name](token)) is not None]
        if known:
            if scale.name == "advantage":
                known += [abs(value) for value in advantages if math.isfinite(value)]
            scales.append(Scale(scale.code, scale.name, scale.title, scale.meaning, scale.diverging, max(known)))
    return tuple(scales)


def token_classes(token: Token, scales: Sequence[Scale]) -> str:
    """Return the CSS classes that color a token, such as "a7 e2"."""
    levels = ((scale.code, scale.level(token)) for scale in scales)
    classes = [f"{code}{level}" for code, level in levels if level is not None]
    return " ".join([*classes, "masked"] if token.weight == 0 else classes)


def token_figures(token: Token) -> list[str]:
    """Return the id and the numbers of a token as text; "" for a number that is not known."""
    values = (read(token) for read in NUMBERS.values())
    return [str(token.id), *("" if value is None else f"{value:.6g}" for value in values)]

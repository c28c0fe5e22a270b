"""Values of the action tokens of an attempt, such as log-probabilities and advantages, and colors for these values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agent_r1.core.events import TokenRecord
from agent_r1.core.trajectory import Turn
from agent_r1.viewer.text import number, visible

Coloring = Literal["advantage", "gap", "logprob", "entropy", "value"]

TokenFigures = Mapping[str, float | None]
"""The values of one token, by name. None: the value is not known.

- ``logprob``: the log-probability that the engine computed
- ``trainer``: the log-probability that the trainer computed
- ``gap``: ``trainer`` minus ``logprob``
- ``advantage``, ``entropy``, ``value`` (of the critic), ``weight`` (the loss weight)
"""

MAX_TOKENS = 20_000
"""The largest number of tokens that a page shows one by one. Each attempt gets an equal part of this number.

A turn with more tokens than are left for its attempt is shown only as text.
"""

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Scale:
    """A color scale for one kind of value of a token, such as the advantage. Each value gets a level with a color.

    Attributes:
        code: the letter of the CSS classes. The class ``a7`` is level 7 of the scale ``a``.
        meaning: the explanation in the legend.
        diverging: True: levels 0 to 8, with 4 for the value 0. False: levels 0 to 4 for the absolute value.
        largest: the largest absolute value on the scale. A value beyond the scale gets the last level, or the first
            level if ``diverging`` is true and the value is negative.
    """

    coloring: Coloring
    code: str
    title: str
    meaning: str
    diverging: bool
    largest: float

    def level(self, value: float | None) -> int | None:
        """Return the level, which determines the color of ``value``. Return None if ``value`` is None or not finite."""
        if value is None or not math.isfinite(value):
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
        sign = -1 if self.coloring == "logprob" else 1
        return ((0, "0"), *((level, number(sign * level / 4 * self.largest, 3)) for level in range(1, 5)))


@dataclass(frozen=True, slots=True)
class Token:
    """A token on a page.

    Attributes:
        text: the text of the token. Hidden characters are replaced by visible codes.
        classes: the CSS classes that color the token, such as "a7 e2".
        figures: the values that ``FIGURES`` names, such as the log-probability and the advantage, each written as text.
            An unknown value is "".
    """

    text: str
    classes: str
    figures: tuple[str, ...]


FIGURES = ("token id", "log-prob, engine", "log-prob, trainer", "gap", "advantage", "loss weight", "entropy", "value")

_SCALES: Mapping[Coloring, tuple[str, str, str, bool]] = {
    "advantage": ("a", "Advantage", "orange: its probability is lowered; blue: it is raised", True),
    "gap": ("g", "Log-probability gap", "trainer minus engine", True),
    "logprob": ("l", "Log-probability", "of the engine; darker tokens were less likely", False),
    "entropy": ("e", "Entropy", "of the policy at the token, in nats", False),
    "value": ("v", "Value", "of the critic before the token", True),
}


def find_tokenizer(folder: Path, model: Path | None) -> Path | None:
    """Return the path of a run's ``tokenizer.json``, or None."""
    checkpoints = sorted(folder.glob(f"checkpoints/step-*/{TOKENIZER}"))
    candidates = [folder / "model" / TOKENIZER, *checkpoints[-1:], *([model / TOKENIZER] if model else [])]
    return next(filter(Path.is_file, candidates), None)


def load_tokenizer(file: Path) -> Tokenizer | None:
    """Load a tokenizer. Return None if the file cannot be read."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the package raises Exception if a file cannot be read
        return None


def read_tokenizer(folder: Path, model: Path | None) -> Tokenizer | None:
    """Load the tokenizer of a run.

    Return None if :func:`find_tokenizer` finds no file, or if the file cannot be read.
    """
    file = find_tokenizer(folder, model)
    return None if file is None else load_tokenizer(file)


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


def figures_of(turn: Turn, record: TokenRecord | None) -> list[TokenFigures]:
    """Return the values of each action token of a turn, such as its advantage.

    Without a ``record``, only ``logprob`` is known.
    """
    count = len(turn.action_ids)
    unknown: tuple[None, ...] = (None,) * count
    columns: dict[str, Sequence[float | None]] = {"logprob": turn.logprobs}
    if record is not None:
        columns |= {"trainer": record.logprobs, "advantage": record.advantages, "weight": record.loss_weights}
        columns |= {"entropy": record.entropies, "value": record.values or unknown}
        columns["gap"] = [trainer - engine for trainer, engine in zip(record.logprobs, turn.logprobs, strict=False)]
    return [
        {name: column[index] if index < len(column) else None for name, column in columns.items()}
        for index in range(count)
    ]


def make_scales(figures: Sequence[TokenFigures]) -> tuple[Scale, ...]:
    """Return a color scale for each kind of value (``Coloring``) with a finite value in ``figures``."""
    scales = []
    for coloring, (code, title, meaning, diverging) in _SCALES.items():
        known = [abs(value) for one in figures if (value := one.get(coloring)) is not None and math.isfinite(value)]
        if known:
            scales.append(Scale(coloring, code, title, meaning, diverging, max(known)))
    return tuple(scales)


def make_tokens(
    turn: Turn, figures: Sequence[TokenFigures], scales: Sequence[Scale], texts: Sequence[str]
) -> Iterator[Token]:
    """Yield the action tokens of a turn. ``figures`` and ``texts`` have one entry per token."""
    for token_id, text, own in zip(turn.action_ids, texts, figures, strict=True):
        levels = ((scale.code, scale.level(own.get(scale.coloring))) for scale in scales)
        classes = " ".join(f"{code}{level}" for code, level in levels if level is not None)
        if own.get("weight") == 0:
            classes += " masked"
        order = ("logprob", "trainer", "gap", "advantage", "weight", "entropy", "value")
        yield Token(visible(text), classes, (str(token_id), *(_exact(own.get(name)) for name in order)))


def _exact(value: float | None) -> str:
    return "" if value is None else "NaN" if math.isnan(value) else f"{value:.6g}"

"""The tokens of a turn in the terminal: the state as text, the action tokens as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.token_record import TokenRecord
from agent_r1.core.trajectory import Turn
from agent_r1.viewer.text import visible

NUMBERS = ("engine", "trainer", "gap", "advantage", "entropy", "value", "weight")
"""The columns with numbers in the token table, from left to right."""

_IMPORTANCE = ("advantage", "engine", "trainer", "gap", "entropy", "value", "weight")
"""The columns with numbers, the most important first. A narrow terminal shows only the most important columns."""

_NUMBER_WIDTH, _OTHER_WIDTH, _TEXT_WIDTH = 10, 38, 22

MAX_STATE_TOKENS = 200
"""The largest number of prompt tokens or tool-result tokens that are printed for a turn. If a turn has more, only the
first and the last tokens are printed, unless the user asks for all tokens."""

_LOWERED = ("color(215)", "color(208)", "color(202)", "color(196)")
"""The colors of negative advantages (orange), from small to large absolute values."""
_RAISED = ("color(117)", "color(75)", "color(39)", "color(33)")
"""The colors of positive advantages (blue), from small to large values."""


@dataclass(frozen=True, slots=True)
class TokenLine:
    """One action token with its numbers. A number that was not recorded is None.

    Attributes:
        loss_mask: whether the policy loss includes the token.
        engine: the log-probability in the engine that sampled the token.
        trainer: the log-probability in the trainer before the update.
        gap: ``trainer`` minus ``engine``.
        weight: the weight of the token in the policy loss.
    """

    id: int
    text: str
    loss_mask: bool | None
    engine: float | None
    trainer: float | None
    gap: float | None
    advantage: float | None
    entropy: float | None
    value: float | None
    weight: float | None

    def number(self, name: str) -> float | None:
        found: float | None = asdict(self)[name]
        return found


def token_lines(turn: Turn, record: TokenRecord | None, texts: Sequence[str]) -> Iterator[TokenLine]:
    """Yield one line for each action token of a turn.

    ``record`` holds the trainer's numbers for the tokens, such as advantages; None if the run recorded no such numbers
    for the turn. ``texts`` holds the text of each action token.
    """
    unknown = (math.nan,) * len(turn.action_ids)
    blank = TokenRecord(AttemptId("", "", 0, 0), turn.index, unknown, unknown, unknown, unknown)
    known = record or blank
    numbers = (known.logprobs, known.advantages, known.loss_weights, known.entropies, known.values or unknown)
    for token_id, text, engine, trainer, advantage, weight, entropy, value in zip(
        turn.action_ids, texts, turn.logprobs, *numbers, strict=True
    ):
        yield TokenLine(
            id=token_id,
            text=text,
            loss_mask=None if math.isnan(weight) else weight != 0,
            engine=_finite(engine),
            trainer=_finite(trainer),
            gap=_finite(trainer - engine),
            advantage=_finite(advantage),
            entropy=_finite(entropy),
            value=_finite(value),
            weight=_finite(weight),
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def largest_advantage(lines: Iterable[TokenLine]) -> float:
    """Return the largest absolute advantage of the tokens; 0 if no advantage is known."""
    return max((abs(line.advantage) for line in lines if line.advantage is not None), default=0.0)


@dataclass(frozen=True, slots=True)
class StateToken:
    """A token that the policy saw and did not sample, such as a token of a tool result."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The tokens of a turn.

    Attributes:
        state: the tokens of the prompt that are new in this turn, such as the tokens of a tool result.
        action: the tokens that the policy sampled.
    """

    state: tuple[StateToken, ...]
    action: tuple[TokenLine, ...]

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        return {"state_tokens": [*map(asdict, self.state)], "tokens": [*map(asdict, self.action)]}


def state_text(tokens: Sequence[StateToken], prints_all: bool) -> Text:
    """Return the tokens of a state as dimmed text, with a vertical bar between two tokens.

    If there are more than MAX_STATE_TOKENS tokens, the middle tokens are left out, unless ``prints_all`` is true.
    """
    left_out = 0 if prints_all else max(0, len(tokens) - MAX_STATE_TOKENS)
    shown = [_without_breaks(token.text) for token in tokens]
    text = Text(f"{len(tokens):,} token{'' if len(tokens) == 1 else 's'}, not trained\n", "dim")
    if not left_out:
        return text.append("│".join(shown), "dim")
    half = MAX_STATE_TOKENS // 2
    text.append("│".join(shown[:half]), "dim")
    text.append(f" … {left_out:,} tokens left out (--all_tokens prints them) … ", "yellow")
    return text.append("│".join(shown[-half:]), "dim")


def token_table(lines: Sequence[TokenLine], largest: float, width: int) -> Table:
    """Return the table of the action tokens of a turn. The colors show the advantages.

    ``largest`` is the absolute advantage that gets the strongest color. A narrow table has fewer columns.
    """
    known = [name for name in _IMPORTANCE if any(line.number(name) is not None for line in lines)]
    fitting = known[: max(1, (width - _OTHER_WIDTH) // _NUMBER_WIDTH)]
    shown = [name for name in NUMBERS if name in fitting]
    header = ("", "token", "id", "loss", *shown)
    grid = Table.grid(padding=(0, 1, 0, 0))
    for name in header:
        is_text = name == "token"
        grid.add_column(
            justify="left" if is_text else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=_TEXT_WIDTH if is_text else None,
            min_width=_NUMBER_WIDTH - 1 if name in shown else None,
        )
    grid.add_row(*(Text(name, "dim") for name in header))
    for position, line in enumerate(lines):
        style = "dim" if line.loss_mask is False else advantage_style(line.advantage, largest)
        loss = "-" if line.loss_mask is None else str(int(line.loss_mask))
        numbers = (Text(_format(line.number(name)), style if name == "advantage" else "") for name in shown)
        grid.add_row(Text(str(position), "dim"), Text(_one_line(line.text), style), str(line.id), loss, *numbers)
    return grid


def advantage_style(advantage: float | None, largest: float) -> str:
    """Return the color of an advantage; "" if the advantage is 0 or not known.

    ``largest`` is the absolute advantage that gets the strongest color.
    """
    if not advantage or not largest:
        return ""
    level = min(3, int(4 * abs(advantage) / largest))
    return (_RAISED if advantage > 0 else _LOWERED)[level]


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) >= 5e-4 or value == 0 else f"{value:.1e}"


def _one_line(text: str) -> str:
    """Return the text of a token as one line. Line breaks and tabs become visible characters.

    If the line begins or ends with a space, all spaces in the line become visible characters too.
    """
    line = _without_breaks(text)
    return line.replace(" ", "␣") if line != line.strip() or not line else line


def _without_breaks(text: str) -> str:
    return visible(text).replace("\n", "↵").replace("\t", "⇥")

"""The methods in the paper's tables: how each is run here, and the figures that the paper reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Command = Literal["train", "eval"]

Setting = str | int | float | bool | tuple[str, ...]

SOURCE = "arXiv 2511.14460v1"


@dataclass(frozen=True, slots=True)
class Figures:
    """Exact match as the paper reports it (arXiv 2511.14460v1, tables 3 and 4), from one run and without a spread.

    Example:
        Figures(hotpotqa=0.4405, two_wiki=0.5741, musique=0.1485, average=0.3877)
    """

    hotpotqa: float
    two_wiki: float
    musique: float
    average: float


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the paper's tables.

    Attributes:
        command: the ``agent-r1`` command that runs it.
        settings: the settings that differ from the defaults.
        figures: the paper's figures, None if the paper does not have this method.
        ablates: the name of the method that this one is an ablation of.
        table: the paper's table to which the method belongs.
        critic: whether the method has a critic.

    Example:
        Method("grpo", "GRPO", "train", {"algorithm": "grpo"}, Figures(0.4405, 0.5741, 0.1485, 0.3877))
    """

    name: str
    title: str
    command: Command
    settings: Mapping[str, Setting]
    figures: Figures | None = None
    ablates: str | None = None
    table: Literal[3, 4] = 3
    critic: bool = False

    @property
    def trains(self) -> bool:
        """Whether the method trains a model. If not, its seed would only draw other samples."""
        return self.command == "train"

    @property
    def table_key(self) -> str:
        """The key of this method in the table that its command prints."""
        return "trained" if self.command == "train" else self.name


NAIVE_RAG = Method(
    "naive-rag", "Naive RAG", "eval", {"methods": ("naive-rag",)}, Figures(0.1916, 0.1792, 0.0277, 0.1328)
)

BASE_TOOL_CALL = Method(
    "base-tool-call",
    "Base Tool Call",
    "eval",
    {"methods": ("base-tool-call",)},
    Figures(0.1372, 0.0891, 0.0277, 0.0847),
)
"""The base model with its tool, before training."""

GRPO = Method("grpo", "GRPO", "train", {"algorithm": "grpo"}, Figures(0.4405, 0.5741, 0.1485, 0.3877))

COMPARED = (
    NAIVE_RAG,
    BASE_TOOL_CALL,
    Method("ppo", "PPO", "train", {"algorithm": "ppo"}, Figures(0.4136, 0.5468, 0.1552, 0.3719), critic=True),
    GRPO,
    Method(
        "reinforce++", "REINFORCE++", "train", {"algorithm": "reinforce++"}, Figures(0.3768, 0.4796, 0.1336, 0.3300)
    ),
    Method(
        "reinforce++-baseline",
        "REINFORCE++-baseline",
        "train",
        {"algorithm": "reinforce++-baseline"},
        Figures(0.3966, 0.5406, 0.1485, 0.3619),
    ),
    Method("rloo", "RLOO", "train", {"algorithm": "rloo"}, Figures(0.4089, 0.5641, 0.1419, 0.3716)),
    Method("steppo", "StepPO", "train", {"algorithm": "steppo"}, critic=True),
)
"""Table 3. StepPO is newer than the paper, so it has no figures."""

LAMBDA_95: Mapping[str, Setting] = {"algorithm": "ppo", "algorithm.advantage.lam": 0.95}
"""With lambda 1, GAE is the return minus the value, whatever tokens are between, so that the advantage mask could only
change which values are whitened."""

ABLATIONS = (
    Method(
        "ppo-95", "PPO (lambda 0.95)", "train", LAMBDA_95, Figures(0.4136, 0.5468, 0.1552, 0.3719), table=4, critic=True
    ),
    Method(
        "ppo-95-no-advantage-mask",
        "PPO (lambda 0.95) without advantage mask",
        "train",
        {**LAMBDA_95, "algorithm.masks.advantage": False},
        Figures(0.3630, 0.4641, 0.1138, 0.3136),
        ablates="ppo-95",
        table=4,
        critic=True,
    ),
    Method(
        "ppo-95-no-masks",
        "PPO (lambda 0.95) without both masks",
        "train",
        {**LAMBDA_95, "algorithm.masks.advantage": False, "algorithm.masks.loss": False},
        Figures(0.3429, 0.4631, 0.1005, 0.3022),
        ablates="ppo-95",
        table=4,
        critic=True,
    ),
    Method(
        "grpo-no-loss-mask",
        "GRPO without loss mask",
        "train",
        {"algorithm": "grpo", "algorithm.masks.loss": False},
        Figures(0.4260, 0.5485, 0.1422, 0.3722),
        ablates="grpo",
        table=4,
    ),
)
"""Table 4: the masks are switched off one after the other."""

METHODS = COMPARED + ABLATIONS


def by_name(methods: Iterable[Method]) -> Mapping[str, Method]:
    """Return the methods by name."""
    return {method.name: method for method in methods}

"""Algorithms that tell turns apart without a critic."""

from __future__ import annotations

from agent_r1.algorithms.advantages.turns import ProcessRelative, SameHistory, SameState, SameTurn, TurnAndOutcome
from agent_r1.algorithms.algorithm import Algorithm

GIGPO = Algorithm(
    name="gigpo",
    paper="2505.10978",
    differs="states are equal word for word, never by similarity; no KL",
    advantage=SameState(),
)
HGPO = Algorithm(
    name="hgpo",
    paper="2602.22817",
    differs="no KL; Bessel's standard deviation; a turn that is like all it is compared with counts as 0",
    advantage=SameHistory(),
)
PROCESS_GRPO = Algorithm(name="process-grpo", paper="2402.03300", differs="no KL", advantage=ProcessRelative())
MT_GRPO = Algorithm(
    name="mt-grpo",
    paper="2505.11821",
    differs="any number of turns: those with results of tools get the process advantage",
    advantage=TurnAndOutcome(),
)
GTPO = Algorithm(
    name="gtpo",
    paper="2511.14846",
    differs="turn rewards are those of the world: none are made of how alike generated programs are",
    advantage=SameTurn(gamma=0.9),
)

"""Presets without a critic. These presets compare the turns of a group with each other."""

from __future__ import annotations

from agent_r1.algorithms.advantages.turns import ProcessRelative, SameHistory, SameState, SameTurn, TurnAndOutcome
from agent_r1.algorithms.algorithm import Algorithm

GIGPO = Algorithm(
    name="gigpo",
    paper="2505.10978",
    deviations="states are equal word for word, never by similarity; each attempt counts once in the mean return "
    "of its group, as in the paper, while verl-agent counts it once per turn (advantage.average_over "
    "turns); no KL; dual clip 3, as in verl",
    advantage=SameState(),
)
HGPO = Algorithm(
    name="hgpo",
    paper="2602.22817",
    deviations="no KL; a history at which the return equals the mean keeps its weight, while the recipe in "
    "verl-agent drops it; dual clip 3, as in verl",
    advantage=SameHistory(),
)
PROCESS_GRPO = Algorithm(
    name="process-grpo", paper="2402.03300", deviations="no KL; dual clip 3, as in verl", advantage=ProcessRelative()
)
MT_GRPO = Algorithm(
    name="mt-grpo",
    paper="2505.11821",
    deviations="any number of turns: those with tool results get the process advantage; dual clip 3, as in verl",
    advantage=TurnAndOutcome(),
)
GTPO = Algorithm(
    name="gtpo",
    paper="2511.14846",
    deviations="turn rewards are the environment's; none are derived from the similarity of generated programs; "
    "dual clip 3, as in verl",
    advantage=SameTurn(gamma=0.9),
)

"""Rewards that a run adds to the rewards of its task set: reward models, judges, and terms such as a cost per call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import InvalidInput
from agent_r1.core.suggest import suggest
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Scorer
from agent_r1.reward_models.folder import is_reward_model, load_reward_model
from agent_r1.reward_models.judge import Judge, load_judge
from agent_r1.reward_models.scorer import RewardModelScorer
from agent_r1.rewards import TERMS, FunctionScorer
from agent_r1.training.config import TrainSettings


def extra_scorers(config: TrainSettings, taskset: TaskSet, tokenizer: PreTrainedTokenizerBase) -> tuple[Scorer, ...]:
    """Return the scorers of ``config.extra_rewards``. ``tokenizer`` belongs to the policy.

    Raise InvalidInput if a reward cannot be loaded, or has the name of a reward of the task set.
    """
    for name in config.extra_rewards:
        if name in taskset.rewards:
            do = "give it another name: the task set has a reward of this name"
            raise InvalidInput(f"extra_rewards.{name}", got=config.extra_rewards[name], do=do)
    return tuple(_scorers(config, tokenizer))


def _scorers(config: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> Iterator[Scorer]:
    terms = {name: TERMS[source] for name, source in config.extra_rewards.items() if source in TERMS}
    if terms:
        yield FunctionScorer(terms)
    for name, source in config.extra_rewards.items():
        if source in TERMS:
            continue
        if source.endswith(".toml"):
            yield Judge(name, load_judge(Path(source)))
        elif is_reward_model(Path(source)):
            yield RewardModelScorer(name, load_reward_model(Path(source), tokenizer))
        else:
            do = f"give the folder of a reward model, a judge as FILE.toml, or one of {', '.join(TERMS)}"
            do = f"{suggest(Path(source).name, TERMS)} {do}".strip()
            raise InvalidInput(f"extra_rewards.{name}", got=source, do=do)

"""The folder of a reward model: its weights, its tokenizer, and ``reward_model.json``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import InvalidInput
from agent_r1.model.load import load_model, load_tokenizer, quiet_transformers
from agent_r1.model.value_head import load_value_model, save_value_model
from agent_r1.reward_models.config import ImplicitReward, Kind, LossName, RewardModelConfig
from agent_r1.reward_models.evaluation import Evaluation, without_nan
from agent_r1.reward_models.network import HeadNetwork, ImplicitNetwork, Network, RewardModel, find_sharing
from agent_r1.store.atomic_fs import atomic_dir

DESCRIPTION = "reward_model.json"
"""The name of the file with the settings and the evaluation of a reward model."""

REFERENCE = "reference"
"""The subfolder with the reference model of an implicit reward model."""

FORMAT = 1


class Description(BaseModel):
    """The part of ``reward_model.json`` that is needed to use the reward model."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: int
    kind: Kind
    loss: LossName
    beta: float
    implicit_reward: ImplicitReward = "log_ratio"  # the reward in folders that were made before this setting


def is_reward_model(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def save_reward_model(
    folder: Path,
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RewardModelConfig,
    runs: tuple[str, ...],
    evaluation: Evaluation,
) -> None:
    """Write a reward model to a new folder, which appears only when all its files are written.

    ``runs`` are the names of the runs whose attempts the reward model was trained on.

    Raise InvalidInput if the folder cannot be written.
    """
    about: dict[str, Any] = {
        "format": FORMAT,
        **config.model_dump(mode="json", exclude={"out"}),
        "runs": list(runs),
        "evaluation": without_nan(asdict(evaluation)),
    }
    try:
        with atomic_dir(folder) as temporary:
            with quiet_transformers():
                _save_network(model.network, temporary)
            tokenizer.save_pretrained(temporary)
            (temporary / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput("out", got=f"{folder}: {error.strerror}", do="name a folder that can be written") from error


def _save_network(network: Network, folder: Path) -> None:
    match network:
        case HeadNetwork(model):
            save_value_model(model, folder)
        case ImplicitNetwork(model, reference):
            model.save_pretrained(folder)
            reference.save_pretrained(folder / REFERENCE)


def load_reward_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> RewardModel:
    """Return the reward model in ``folder``, on the CPU, in float32.

    Raise InvalidInput if the folder holds no reward model, or if its vocabulary differs from the policy's
    ``tokenizer``.
    """
    try:
        about = Description.model_validate_json((folder / DESCRIPTION).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        do = f"name a folder that agent-r1 train-reward made: its {DESCRIPTION} cannot be read"
        raise InvalidInput("reward model", got=folder, do=do) from error
    if about.format != FORMAT:
        raise InvalidInput("reward model", got=f"{folder}, of format {about.format}", do="train it again")
    if load_tokenizer(str(folder)).get_vocab() != tokenizer.get_vocab():
        do = "train one on runs of this policy: a reward model reads the policy's tokens"
        raise InvalidInput("reward model", got=f"{folder}, with another vocabulary than the policy", do=do)
    if about.kind == "implicit":
        model, reference = (load_model(str(path), torch.float32) for path in (folder, folder / REFERENCE))
        network = ImplicitNetwork(model, reference, about.beta, find_sharing(model, reference))
        return RewardModel(network, about.kind, about.loss, about.implicit_reward)
    head = load_value_model(folder, torch.float32)
    return RewardModel(HeadNetwork(head, find_sharing(head.backbone)), about.kind, about.loss)

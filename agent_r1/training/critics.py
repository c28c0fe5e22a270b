"""Critics on disk: in folders of ``agent-r1 train-critic``, or in the checkpoints of a run with a critic."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from agent_r1.core.errors import InvalidInput
from agent_r1.inference.config import DecodeConfig
from agent_r1.inference.critic import Critic
from agent_r1.model.folders import first_line
from agent_r1.model.load import load_model
from agent_r1.model.value_head import ValueModel, build_value_model, load_value_model
from agent_r1.store import RunReader, is_run, run_folder
from agent_r1.store.manifest import list_checkpoints
from agent_r1.training.checkpoint.files import saved_tensors

CRITIC = "critic."


def open_critic(config: DecodeConfig, policy: PreTrainedModel) -> Critic:
    """Load the critic of ``config`` to the device of ``policy``, and return the critic's value function.

    Raise InvalidInput if there is no such critic, or if the critic's vocabulary is too small for the policy.
    """
    model, vocabulary = load_critic(config.critic), int(policy.config.get_text_config().vocab_size)
    embedded = int(model.backbone.config.get_text_config().vocab_size)
    if embedded < vocabulary:
        got = f"{config.critic}, which knows {embedded} tokens of the policy's {vocabulary}"
        raise InvalidInput("decode.critic", got=got, do="give a critic that was trained on attempts of this model")
    return Critic(model.to(policy.device))


def load_critic(name: str) -> ValueModel:
    """Return the critic from the folder of a value model, or from the newest checkpoint of a run.

    ``name`` is the path of the value model's folder, or the name or path of the run. Raise InvalidInput if there is no
    critic.
    """
    run = run_folder(name)
    return _load_from_run(run) if is_run(run) else load_value_model(Path(name), torch.float32)


def _load_from_run(run: Path) -> ValueModel:
    with closing(RunReader(run)) as reader:
        config = reader.config()
    do = f"train one with 'agent-r1 train-critic --run {run}'"
    if config["trainer"]["lora"]["rank"]:
        raise InvalidInput("decode.critic", got=f"{run}, a run with LoRA", do=do)
    newest = next(iter(list_checkpoints(run)), None)
    try:
        state = {} if newest is None else saved_tensors(newest)
        weights = {name.removeprefix(CRITIC): state[name] for name in state if name.startswith(CRITIC)}
        if not weights:
            raise InvalidInput("decode.critic", got=f"{run}, which has no checkpoint with a critic", do=do)
        model = build_value_model(load_model(str(config["model"]), torch.float32), "logprob_input.weight" in weights)
        model.load_state_dict(weights)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InvalidInput(
            "decode.critic", got=f"{run}, whose critic fails with: {first_line(error)}", do=do
        ) from error
    return model.eval()

"""The critic: a value model that predicts, at each position of a sequence, the sum of the future rewards."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from agent_r1.core.errors import InvalidInput
from agent_r1.model.adapter import copy_sharing_frozen, merged_copy
from agent_r1.model.folders import first_line
from agent_r1.model.forward import CachedPrefix, PrefixStates, backbone_of, hidden_states
from agent_r1.model.load import check_finite, check_folder, quiet_transformers
from agent_r1.model.vision import PassImages

HEAD_FILE = "value_head.safetensors"
"""The file with the head of a saved value model, beside its backbone."""

LOGPROB_SCALE = 0.25
"""Factor on the log-probabilities that the critic reads, so that most inputs are between -1 and 0."""


class ValueModel(nn.Module):
    """A backbone with a linear head that predicts one value for each token.

    The head is initialized to 0, because random values would add noise to the first update of PPO.

    If ``reads_logprobs`` is true, the model also reads the log-probability with which each token was sampled: a linear
    layer converts it to a vector that is added to the token's embedding.
    """

    def __init__(self, backbone: PreTrainedModel, width: int, reads_logprobs: bool = False) -> None:
        super().__init__()
        weight = next(backbone.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.backbone = backbone
        self.head = nn.Linear(width, 1, dtype=dtype, device=weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.logprob_input: nn.Linear | None = None
        if reads_logprobs:
            embedding = next(backbone.get_input_embeddings().parameters())  # (V, H)
            dtype = torch.promote_types(embedding.dtype, torch.float32)
            self.logprob_input = nn.Linear(2, embedding.shape[1], False, device=embedding.device, dtype=dtype)
            nn.init.normal_(self.logprob_input.weight, std=float(embedding.detach().float().std()))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        subtree_end: Tensor | None = None,
        logprobs: Tensor | None = None,
        prefix: PrefixStates | CachedPrefix | None = None,
        images: PassImages | None = None,
    ) -> Tensor:
        """Return the values (B, T): at each position, the predicted sum of the later rewards.

        The prediction uses the tokens up to and including the position. ``logprobs`` (B, T) are the log-probabilities
        with which the tokens were sampled; 0 for tokens that were not sampled. For the other arguments, see
        :func:`agent_r1.model.forward.hidden_states`.
        """
        added = None
        if self.logprob_input is not None and logprobs is not None:
            surprise = torch.stack([LOGPROB_SCALE * logprobs, 1 - logprobs.exp()], dim=-1)  # (B, T, 2)
            added = self.logprob_input(surprise.to(self.logprob_input.weight.dtype))  # (B, T, H)
        hidden = hidden_states(self.backbone, ids, positions, subtree_end, prefix, images, added)
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


def build_value_model(policy: PreTrainedModel, reads_logprobs: bool = False) -> ValueModel:
    """Return a value model with a copy of the policy's backbone. The policy and the copy share all frozen weights."""
    width = policy.get_output_embeddings().weight.shape[-1]
    return ValueModel(copy_sharing_frozen(backbone_of(policy)), width, reads_logprobs).eval()


def save_value_model(model: ValueModel, folder: Path) -> None:
    """Write a value model to ``folder``: the backbone in the format of transformers, and the head in ``HEAD_FILE``."""
    merged_copy(model.backbone).save_pretrained(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("backbone.")}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / HEAD_FILE)


def load_value_model(folder: Path, dtype: torch.dtype) -> ValueModel:
    """Return the value model that :func:`save_value_model` wrote, in eval mode, with a backbone of type ``dtype``."""
    do = f"name a folder with a value model: config.json, model.safetensors and {HEAD_FILE}"
    if not (folder / HEAD_FILE).is_file():
        raise InvalidInput("value model", got=f"{folder}, without {HEAD_FILE}", do=do)
    check_folder(folder, "value model", str(folder))
    try:
        state = load_file(folder / HEAD_FILE)
        with quiet_transformers():
            backbone = AutoModel.from_pretrained(folder, dtype=dtype, use_safetensors=True, trust_remote_code=False)
        model = ValueModel(backbone, state["head.weight"].shape[1], "logprob_input.weight" in state)
        own = {name for name in model.state_dict() if not name.startswith("backbone.")}
        if own != set(state):
            raise ValueError(f"{HEAD_FILE} has other tensors than {', '.join(sorted(own))}")
        model.load_state_dict(state, strict=False)
    except Exception as error:  # for a broken folder, transformers and safetensors raise many types of errors
        raise InvalidInput("value model", got=f"{folder}: {first_line(error)}", do=do) from error
    check_finite(model, "value model", str(folder))
    return model.eval()

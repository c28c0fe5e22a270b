"""Load the models of a run: the policy with tokenizer and renderer, and the teacher."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.core.environment import env_of
from agent_r1.core.errors import InvalidInput, UnsupportedChat, require_extra
from agent_r1.core.inference import Dtype, InferenceEngine, SamplingParams
from agent_r1.core.messages import Message, ToolSpec
from agent_r1.core.taskset import TaskSet, tool_call
from agent_r1.inference.config import DecodeConfig
from agent_r1.inference.guidance import Critic
from agent_r1.model.adapter import add_adapter, has_adapter
from agent_r1.model.folders import NAMED_MODELS, find_folder, first_line
from agent_r1.model.load import load_images, load_model, load_stop_ids, load_tokenizer
from agent_r1.model.value_head import ValueModel, build_value_model, load_value_model
from agent_r1.model.vision import ImageProcessor
from agent_r1.model.weights import DTYPES, choose_device, set_product_precision
from agent_r1.renderers.formats.detect import open_renderer, require_tools
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.context_policy import build_context_policy
from agent_r1.store.folder import is_run, run_folder
from agent_r1.store.manifest import list_checkpoints
from agent_r1.store.reader import RunReader
from agent_r1.training.checkpoint_files import saved_tensors
from agent_r1.training.config import RunConfig, TrainConfig

_log = logging.getLogger(__name__)

ROWS = 8192
"""The number of rows of a head that are compared at once."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with its tokenizer and its renderer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: TemplateRenderer
    context_length: int  # the maximum number of tokens in a prompt and its action together
    images: ImageProcessor | None = None  # the image processor; None if the model has no vision
    reads_images: bool = False  # whether model and engine accept images

    def agent(self, engine: InferenceEngine, config: RunConfig, temperature: float) -> Agent:
        """Return an agent that samples this policy's actions from ``engine`` at the given temperature."""
        params = SamplingParams(temperature, max_tokens=config.max_tokens)
        context_policy = build_context_policy(config.context_policy)
        return Agent(engine, self.renderer, params, self.context_length, config.seed, context_policy)


def load_policy(config: RunConfig, taskset: TaskSet | None, dtype: Dtype = "float32") -> Policy:
    """Load the model ``config.model`` with weights of type ``dtype``, and return it with its tokenizer and renderer.

    The context length is the smallest of ``config.context`` and the model's own limits. If ``taskset`` is given, the
    chat template is tested with the tools of ``taskset``.
    """
    name, own_code = config.model, config.model in config.own_code
    tokenizer = load_tokenizer(name, own_code=own_code)
    images = load_images(name, tokenizer, own_code)
    reads_images = images is not None and config.engine.backend == "embedded"
    expander = images if reads_images else None
    try:
        renderer = open_renderer(tokenizer, config.tool_format, config.tags, load_stop_ids(name), expander)
        if taskset is not None and taskset.env.tools:
            require_tools(renderer, taskset.env.tools)
    except UnsupportedChat as error:
        raise InvalidInput("chat template", got=config.model, do=str(error)) from error
    device = choose_device(config.device)
    set_product_precision(device, config.tf32)
    model = load_model(name, DTYPES[dtype], own_code).to(device)  # type: ignore[arg-type]
    embedded = int(model.config.get_text_config().vocab_size)
    if len(tokenizer) > embedded:
        got = f"{config.model}, whose tokenizer has {len(tokenizer)} tokens and whose model embeds {embedded}"
        raise InvalidInput("model", got=got, do="name a folder whose model and tokenizer belong together")
    if taskset is not None and (untrained := _untrained_token(model, renderer, _shown_tools(config, taskset))):
        if isinstance(config, TrainConfig) and config.trainer.lora.rank:
            do = "give --tool_format tags, or --trainer.lora.rank 0, which trains the head too"
            raise InvalidInput("tool_format", got=f"{untrained}, and LoRA, which leaves the head as it is", do=do)
        _log.warning("%s; an untrained model cannot call a tool then: give --tool_format tags", untrained)
    context_length = min(config.context, *_context_bounds(model))
    return Policy(model, tokenizer, renderer, context_length, images, reads_images)


def load_trained_policy(config: TrainConfig, taskset: TaskSet) -> Policy:
    """Return the policy that a run trains, with the model ``config.model``.

    With LoRA, the model gets a new adapter, and all other weights are frozen. The trained weights are in float32,
    because bfloat16 cannot represent the small changes of an optimizer step.
    """
    lora = config.trainer.lora
    if lora.rank:
        require_extra("peft", "lora")  # before the model is loaded, which can take long
    if config.trainer.optimizer == "adamw-8bit":
        require_extra("torchao", "8bit")
    policy = load_policy(config, taskset, config.trainer.dtype if lora.rank else "float32")
    if has_adapter(policy.model):
        do = "name a whole model: a run with LoRA saves the merged model as RUN/model when it ends"
        raise InvalidInput("model", got=f"{config.model}, which is an adapter", do=do)
    if lora.rank:
        is_on_hub = config.model not in NAMED_MODELS and not os.path.exists(config.model)
        base = config.model if is_on_hub else str(find_folder(config.model, "model").absolute())
        add_adapter(policy.model, lora, seed=config.seed, base=base)
    return policy


ALIKE = 0.01
"""The largest relative distance between rows of a head that cannot be told apart. Rows of tokens that pretraining never
saw have about 0.002 in a quantized model."""


def _shown_tools(config: RunConfig, taskset: TaskSet) -> tuple[ToolSpec, ...]:
    if taskset.env.tools or not isinstance(config, TrainConfig):
        return taskset.env.tools
    # each task has an environment, or a transcript, with tools of its own
    own = (env_of(taskset.env, task).tools for task in taskset.tasks("train"))
    return next((tools for tools in own if tools), ())


def _untrained_token(model: PreTrainedModel, renderer: TemplateRenderer, tools: tuple[ToolSpec, ...]) -> str:
    # Describe a special token of a tool call whose row in the head is the row of other tokens, too, so that the model
    # writes each of them with the same probability; "" if there is none.
    if not tools:
        return ""
    try:
        call = renderer.write_action((Message.user("Call a tool."),), tool_call(tools[0].name), tools)
    except UnsupportedChat:  # a call without arguments, which the template may refuse
        return ""
    added = {number: text for text, number in renderer.tokenizer.get_added_vocab().items()}
    head = model.get_output_embeddings().weight  # (V, d)
    for token in dict.fromkeys(each for each in call if each in added):
        row = head[token].detach().float()  # (d,)
        distances = [(part.detach().float() - row).norm(dim=1) for part in head.split(ROWS)]  # V numbers
        others = int((torch.cat(distances) < ALIKE * row.norm()).sum()) - 1
        if others > 0:
            return f"{renderer.tool_format.name}, whose {added[token]} has the row of {others} more tokens in the head"
    return ""


def load_teacher(config: TrainConfig, policy: Policy) -> PreTrainedModel | None:
    """Return the model ``config.teacher``; None if the algorithm needs no teacher."""
    algorithm = config.algorithm
    if "teacher" not in algorithm.needs:
        if config.teacher:
            raise InvalidInput("teacher", got=config.teacher, do=f"leave it out: {algorithm.name} does not use one")
        return None
    if not config.teacher:
        raise InvalidInput("teacher", got="none", do=f"name a model or a folder: {algorithm.name} learns from one")
    name, own_code = config.teacher, config.teacher in config.own_code
    if load_tokenizer(name, own_code=own_code).get_vocab() != policy.tokenizer.get_vocab():
        got = f"{config.teacher}, with another vocabulary"
        raise InvalidInput("teacher", got=got, do="name one with the same tokens")
    teacher = load_model(name, DTYPES[config.trainer.dtype], own_code).to(policy.model.device)  # type: ignore[arg-type]
    if policy.images is not None and teacher.config.model_type != policy.model.config.model_type:
        got = f"{name}, of the type {teacher.config.model_type}"
        raise InvalidInput("teacher", got=got, do="name one with the vision of the policy's model")
    return teacher


def _context_bounds(model: PreTrainedModel) -> list[int]:
    settings = model.config.get_text_config()
    window = getattr(settings, "sliding_window", None) if getattr(settings, "use_sliding_window", True) else None
    bounds = (getattr(settings, "max_position_embeddings", None), window)
    return [bound for bound in bounds if bound]


CRITIC = "critic."


def open_critic(config: DecodeConfig, policy: PreTrainedModel) -> Critic:
    """Load the critic of ``config`` to the device of ``policy``, and return the critic's value function."""
    model, vocabulary = load_critic(config.critic), int(policy.config.get_text_config().vocab_size)
    embedded = int(model.backbone.config.get_text_config().vocab_size)
    if embedded < vocabulary:
        got = f"{config.critic}, which knows {embedded} tokens of the policy's {vocabulary}"
        raise InvalidInput("decode.critic", got=got, do="give a critic that was trained on attempts of this model")
    return Critic(model.to(policy.device))


def load_critic(name: str) -> ValueModel:
    """Return the critic from the folder of a value model, or from the newest checkpoint of a run."""
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

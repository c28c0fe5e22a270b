"""The settings of training and evaluation. Importing this module does not import torch."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from agent_r1.config import BUILD, NESTED_BY_NAME, Layer, resolve, settings_of
from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import ProductPrecision
from agent_r1.core.redaction import redact_url
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import RewardSchedule
from agent_r1.gateway.config import GatewayConfig
from agent_r1.inference.config import DecodeConfig, EngineConfig
from agent_r1.renderers.formats.tags import TagsConfig
from agent_r1.rewards.scoring import TERMS
from agent_r1.rollout.context_policy import ContextPolicyConfig
from agent_r1.sandbox.config import SandboxLevel
from agent_r1.store.saved_weights import find_folder
from agent_r1.tasksets import TASKSETS, TRANSCRIPTS, is_available
from agent_r1.tasksets.files import is_hub
from agent_r1.trackers import TrackerName
from agent_r1.trainer.config import TrainerConfig
from agent_r1.workers.protocol import EnvironmentConfig

GAP_LIMITS: Mapping[ProductPrecision, float] = {"float32": 1e-2, "tf32": 0.5, "bfloat16": 3.0}


class MonitorConfig(BaseModel):
    """Limits of the health checks. Beyond a limit, the monitor warns or stops the run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    failure_share: float = Field(default=0.5, gt=0, le=1)
    """Stop the run if more than this share of the recent attempts failed, or if a tool always fails for the same cause.
    The recent attempts are those of the last three steps, at most 256. 1: stop in neither case."""

    patience: int = Field(default=3, ge=1)
    """Stop the run if engine and trainer disagree (see logprob_gap), or if gradients are not finite, in this many
    consecutive steps. Before that, only warn."""

    logprob_gap: float | None = Field(default=None, gt=0)
    """Limit of the difference between a token's log-probabilities in engine and trainer, for tokens sampled with the
    newest weights. None: the limit is 0.01 if engine and trainer compute in float32, 0.5 if one computes in TF32, and 3
    if one computes in bfloat16."""

    true_reward: str = ""
    """Name of the true reward, which measures the real goal of the run. Warn if the true reward falls while the reward
    on which the run trains rises. Empty: em or exact_match if its weight is 0, otherwise no check."""

    def gap_limit(self, trainer: ProductPrecision, engine: ProductPrecision) -> float:
        """Return the limit of the log-probability gap for the precisions in which trainer and engine compute."""
        return self.logprob_gap or max(GAP_LIMITS[trainer], GAP_LIMITS[engine])


Launcher = Literal["processes", "ray"]
"""What starts the ranks of the trainer and the vLLM servers: the run itself ("processes"), or Ray ("ray")."""

LOOPBACK = "127.0.0.1"


class PlacementConfig(BaseModel):
    """Settings: what starts the ranks and the vLLM servers of a run, and which resources each process gets."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    launcher: Launcher = "processes"
    """What starts the ranks and vLLM servers. processes: the run itself, on this machine. ray: Ray, on the machines of
    a cluster; see docs/scaling.md."""

    address: str = ""
    """Address of a running Ray cluster, such as 10.0.0.5:6379. Empty: the run starts Ray on this machine, and stops it
    at the end."""

    host: str = LOOPBACK
    """Address of this machine in the Ray cluster, such as 10.0.0.5. Ranks connect to the run at this address."""

    spread: bool = False
    """Whether Ray puts the processes on as many machines as it can, so that fewer are lost with a machine. By default,
    it puts them on as few as it can."""

    cpus: float = Field(default=1.0, gt=0, le=4096)
    """CPU cores that Ray reserves for each rank and each server, such as 0.5."""

    @field_validator("host")
    @classmethod
    def _require_ipv4(cls, value: str) -> str:
        try:
            ipaddress.IPv4Address(value)
        except ValueError:
            raise ValueError("give an IPv4 address, such as 10.0.0.5") from None
        return value

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        changed = [name for name, field in type(self).model_fields.items() if dict(self)[name] != field.default]
        if changed and self.launcher != "ray":
            raise ValueError("these settings have an effect only with placement.launcher ray: give that")
        if self.host != LOOPBACK and not self.address:
            raise ValueError("placement.host needs placement.address: a Ray that the run starts listens on loopback")
        return self


if TYPE_CHECKING:
    from agent_r1.algorithms.algorithm import Algorithm
else:
    Algorithm = Any  # importing the class would import torch; only the validator _as_algorithm needs the class

DEFAULT_ALGORITHM = "grpo"


def _absolute(data: Path) -> Path:
    return data if is_hub(data) else data.absolute()


def _absolute_taskset(name: str) -> str:
    return name if name in TASKSETS or not is_available(name) else str(Path(name).absolute())


def _absolute_file(agent: str) -> str:
    file, colon, name = agent.rpartition(":")
    return f"{Path(file).absolute()}{colon}{name}" if file else agent


def _absolute_source(source: str) -> str:
    return source if source in TERMS else str(Path(source).absolute())


def _checked_schedule(text: str) -> str:
    RewardSchedule.parse(text)
    return text


def _as_algorithm(value: object, info: ValidationInfo) -> object:
    if info.context is not None and not info.context[BUILD]:
        return value
    from agent_r1.algorithms.registry import as_algorithm

    return as_algorithm(value, DEFAULT_ALGORITHM)


class TasksetConfig(BaseModel):
    """Settings of a task set."""

    section: ClassVar[str] = "Task set"
    """Heading of these settings in ``--help``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    data: Annotated[Path, AfterValidator(_absolute)] | None = None
    """File of questions, or hf:NAME for a data set on the Hugging Face hub. Task set wikifilm: a file of pages,
    from which questions are built. Task set multihop: a file of questions, hf:NAME, or a TOML file that lists several
    data sets."""

    corpus: str | None = None
    """Corpus to search: a file of passages, a TOML file that describes a search, or a retriever's http:// address."""

    encoder: str = ""
    """Sentence encoder of the search: all-minilm, a folder, or a Hugging Face name; empty: BM25."""

    sandbox: SandboxLevel | None = None
    """Isolation of code written by the policy: "bubblewrap" or "none" (no isolation). Only for task sets that run such
    code. Their default is "bubblewrap"."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of generated task sets, sampling and initial weights."""

    @field_serializer("corpus", "data", when_used="json-unless-none")
    def _without_credentials(self, value: str | Path) -> str:
        # Remove credentials from addresses, because a run stores its settings.
        return redact_url(str(value))


class RunConfig(TasksetConfig):
    """Settings shared by training and evaluation: the task set, the model, and the limits of an attempt."""

    section: ClassVar[str] = "Model and rollout"

    taskset: Annotated[str, AfterValidator(_absolute_taskset)] = "tinywiki"
    """Task set: a name that 'agent-r1 tasksets' lists, or the path of a file or folder that defines build."""

    splits: tuple[str, ...] = ()
    """Splits in the table of results, separated by commas; empty: the evaluation splits of the task set."""

    model: str = ""
    """Model: tiny-base, smollm2-135m, a folder, FILE.gguf, a Hugging Face name, or the weights of a run: RUN (the best
    ones), or RUN@STEP of a checkpoint. Empty: the task set's default."""

    own_code: tuple[str, ...] = ()
    """Models, as named in model or teacher, whose own Python code (auto_map in their configuration) may run with your
    rights. The code of all others never runs."""

    max_tokens: int = Field(default=1024, ge=1)
    """Maximum number of new tokens per turn."""

    context: int = Field(default=8192, ge=2)
    """Maximum number of tokens in the context of the policy: prompts, actions and tool results."""

    context_policy: ContextPolicyConfig = ContextPolicyConfig()
    """How a long history is shortened."""

    agent: Annotated[str, AfterValidator(_absolute_file)] = ""
    """Your own agent: FILE.py:NAME of a function with the parameters (base_url, api_key, task). The function calls the
    model over HTTP; see docs/gateway.md. Empty: the function run of FILE.py, if it has one; else the built-in loop."""

    gateway: GatewayConfig = GatewayConfig()
    """Settings of the gateway, through which your own agent (--agent) calls the model."""

    engine: EngineConfig = EngineConfig()
    """The engine, which generates tokens."""

    tool_format: str = "auto"
    """Format of tool calls: auto (detected from the chat template), hermes, qwen3.5, glm, llama3, deepseek, harmony,
    lfm2, response (the response template of the tokenizer), or tags (for models without a tool format)."""

    tags: TagsConfig = TagsConfig()
    """Names of the tags in the tool format 'tags'."""

    concurrency: int = Field(default=256, ge=1)
    """Maximum number of episodes that run at the same time."""

    episode_seconds: float = Field(default=600.0, gt=0)
    """Time limit of an episode, in seconds. A longer episode is dropped."""

    score_seconds: float = Field(default=600.0, gt=0)
    """Time limit for each scorer to score a group, in seconds. If a scorer takes longer, the group is dropped."""

    pass_k: int = Field(default=0, ge=0)
    """Number k for pass@k, the probability that at least one of k sampled attempts is right; 0: no pass@k. The same
    attempts also give pass@1 and the scores of the majority vote and of the likeliest attempt. A training run computes
    pass@k only of the base model, on at most 50 questions per split."""

    pass_attempts: int = Field(default=0, ge=0)
    """Number of sampled attempts per question, from which pass@1 and pass@k are estimated. 0: as many as pass_k. Any
    other number must be at least pass_k."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Other machines (workers) that run the environments and tools."""

    placement: PlacementConfig = PlacementConfig()
    """Launcher of the trainer's ranks and of vLLM servers."""

    retries: int = Field(default=2, ge=0)
    """Maximum number of retries of an attempt if the environment or the engine fails."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the model: auto (a GPU if there is one), cpu, cuda, cuda:N."""

    tf32: bool = False
    """Whether GPUs multiply float32 matrices in TF32, with 11 instead of 24 significant bits. Then larger differences
    between engine and trainer count as rounding errors. No effect on CPUs or on inference servers such as vLLM."""

    threads: int = Field(default=1, ge=1, le=256)
    """Number of torch threads. Runs with different numbers of threads are not bit-identical."""

    @field_validator("tags")
    @classmethod
    def _require_tag_format(cls, value: TagsConfig, info: ValidationInfo) -> TagsConfig:
        if value != TagsConfig() and info.data.get("tool_format") != "tags":
            raise ValueError("tags have an effect only with tool_format tags: give that, or leave them out")
        return value

    @field_validator("pass_attempts")
    @classmethod
    def _require_k_attempts(cls, value: int, info: ValidationInfo) -> int:
        k = info.data.get("pass_k", 0)
        if value and not value >= k > 0:
            raise ValueError(f"give pass_k too, and at least so many attempts: pass_k is {k}")
        return value


class TrainConfig(RunConfig):
    """Settings of a training run. The defaults fit a model of 3B parameters."""

    section: ClassVar[str] = "Training"

    algorithm: Annotated[Algorithm, NESTED_BY_NAME, PlainValidator(_as_algorithm)] = Field(
        default=DEFAULT_ALGORITHM, validate_default=True
    )
    """Name of an algorithm ('agent-r1 algorithms' lists the names), or FILE.py:NAME for an algorithm of your own."""

    teacher: str = ""
    """Model that a distillation algorithm learns from: a Hugging Face name or a folder."""

    trainer: TrainerConfig = TrainerConfig()
    """Optimizer and batches."""

    monitor: MonitorConfig = MonitorConfig()
    """Limits at which a run warns or is stopped."""

    run: str = ""
    """Name of the run's folder in runs/, or a path; empty: a name made from task set, algorithm and time."""

    steps: int = Field(default=200, ge=1)
    """Optimizer steps."""

    groups_per_step: int = Field(default=16, ge=1)
    """Tasks per optimizer step."""

    group_size: int = Field(default=8, ge=1, le=65536)
    """Attempts per task."""

    sampling: Literal["uniform", "adaptive"] = "uniform"
    """Choice of the tasks. uniform: all in turn, in a random order. adaptive: the same order, without most of those
    whose groups had equal rewards before: what is always solved or never teaches nothing. Skipped tasks come back."""

    example_coef: float = Field(default=0.0, ge=0)
    """Weight of an imitation loss, the mean of -log pi over a solution of the task set, for each group in which no
    attempt is a success. The solution counts in no metric and in no baseline. 0: off."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum age, in optimizer steps, of an attempt's oldest token when the attempt is trained on; 0: synchronous
    training."""

    # There is no top_p and no top_k: truncated sampling would bias the importance ratio.
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Sampling temperature in training. Evaluation is greedy, except for pass@k (temperature 1)."""

    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of rewards by name, as --reward_weights.NAME X. The default weight is 1. Weight 0: the reward is
    recorded, but not trained on."""

    extra_rewards: dict[str, Annotated[str, AfterValidator(_absolute_source)]] = Field(default_factory=dict)
    """Extra rewards, only for training, as --extra_rewards.NAME SOURCE. SOURCE is the folder of a reward model, the
    FILE.toml of a judge, or one of these names: "calls", "repeated_calls", "failed_calls", "tokens", "logprob",
    "format", "grounded"."""

    reward_schedules: dict[str, Annotated[str, AfterValidator(_checked_schedule)]] = Field(default_factory=dict)
    """Factors on the weights of rewards, as --reward_schedules.NAME STEP:FACTOR,STEP:FACTOR. Between two given
    steps, the factor changes linearly. Example: 1:0,50:1 raises a weight from 0 over 50 steps."""

    shuffle_rewards: bool = False
    """Shuffle the rewards among the attempts at each task, for a control experiment. ``group_size`` must be at least 2.
    The environment's process rewards are not shuffled."""

    evaluate_every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations on the validation split; 0: no validation."""

    stop_after: int = Field(default=0, ge=0)
    """End the training after this number of validations without a better one, and make the table; 0: after ``steps``.
    It needs ``evaluate_every``."""

    evaluate_n: int = Field(default=200, ge=0)
    """Maximum number of questions per split in each evaluation; 0: no validation, and no table at the end."""

    checkpoint_every: int = Field(default=5, ge=0)
    """Optimizer steps between checkpoints; 0: no checkpoints, so an interrupted run restarts from step 0."""

    checkpoint_keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, in addition to the best checkpoint by validation."""

    track: tuple[TrackerName, ...] = ()
    """Trackers that show the metrics during training, separated by commas: tensorboard, wandb, trackio, mlflow."""

    record_tokens: int = Field(default=2, ge=0)
    """Number of groups per optimizer step whose tokens are recorded: log-probability in the trainer, advantage, loss
    weight, entropy, and value of the critic. 0: no records."""

    profile: int = Field(default=0, ge=0)
    """Number of optimizer steps between printed tables. Each table shows the time of each part of a step, as the mean
    over these steps. The table after the last step shows the mean over all steps. 0: the time is not measured."""

    @property
    def acts(self) -> bool:
        """Whether the policy makes attempts. In a run on transcripts, others have written all answers."""
        return self.taskset != TRANSCRIPTS

    @field_validator("shuffle_rewards")
    @classmethod
    def _require_groups(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("group_size") == 1:
            raise ValueError("give a group_size of at least 2: the reward of a single attempt cannot be shuffled")
        return value


class EvalConfig(RunConfig):
    """Settings of an evaluation."""

    section: ClassVar[str] = "Evaluation"

    methods: tuple[str, ...] = ()
    """Methods (rows of the table), separated by commas, for example naive-rag,base-tool-call,trained; empty: all.
    Models behind an API always have their rows."""

    evaluate_n: int = Field(default=200, ge=1)
    """Maximum number of questions per split."""

    decode: DecodeConfig = DecodeConfig()
    """Guidance of actions by a critic. The table of results gets one more row, for the agent with guidance."""

    api_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Base address of chat completions, such as https://api.openai.com/v1, for rows of models behind an API. The API
    key is in the environment variable AGENT_R1_API_KEY or OPENAI_API_KEY; none is needed if the server needs none."""

    api_model: tuple[str, ...] = Field(default=(), validate_default=True)
    """Models behind api_url, separated by commas. Each is a row of the table, with its name. Without model, no other
    row is evaluated."""

    api_prices: tuple[float, ...] = ()
    """Prices of a million prompt tokens and of a million completion tokens, for each model of api_model: 0.15,0.6."""

    api_seconds: float = Field(default=120.0, gt=0)
    """Time limit of one request to api_url, in seconds."""

    labels: tuple[str, ...] = ()
    """Names for rows of the table, as ROW=NAME, separated by commas: trained=grpo,base-tool-call=qwen."""

    @field_validator("api_model")
    @classmethod
    def _require_url(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        url = info.data.get("api_url")
        if url is not None and bool(url) != bool(value):  # None: the address is wrong, which is reported
            raise ValueError("give api_url and api_model, or neither")
        if not all(value) or len(set(value)) < len(value):
            raise ValueError("give different names")
        return value

    @field_validator("api_prices")
    @classmethod
    def _require_prices(cls, value: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if len(value) not in (0, 2 * len(info.data.get("api_model", ()))) or min(value, default=0) < 0:
            raise ValueError("give two prices, of prompt and of completion tokens, for each model of api_model")
        return value


Resolved = TypeVar("Resolved", bound=RunConfig)

LIMITS = frozenset({"max_tokens", "context"})
"""The settings that a task set chooses for its default model, and that do not fit another model."""


def resolve_config(cls: type[Resolved], layers: Sequence[Layer], taskset: TaskSet) -> Resolved:
    """Return the configuration from ``layers`` and the defaults of the task set.

    Unless trainer and engine compute in float32, the algorithm gets an importance weight, if no layer sets
    ``algorithm.correction``.
    """
    # An evaluation measures pass@k on request only, and needs no model of the task set beside models behind an API.
    given = settings_of(cls, layers, TrainConfig)
    has_api = bool(given.get("api_model"))
    left_out = set() if cls is TrainConfig else {"pass_k", "model"} if has_api else {"pass_k"}
    if has_api and not given.get("model") and "model" in taskset.recipe:
        left_out |= LIMITS  # tiny-base has room for 32 tokens a turn: the answers of other models would be cut
    recipe = {key: value for key, value in taskset.recipe.items() if key not in left_out}
    layers = [*layers, Layer(f"defaults of {taskset.name}", recipe)]
    config = resolve(cls, layers, TrainConfig)
    if not config.model and not has_api:
        raise InvalidInput("model", got="nothing", do="give --model: a Hugging Face name or a folder")
    if not isinstance(config, TrainConfig):
        return config
    config.trainer.schedule.check_steps(config.steps)
    from agent_r1.algorithms.validation import with_correction  # imported here, because the module imports torch
    from agent_r1.model.folders import NAMED_MODELS

    def locate(model: str) -> str:  # the run stores folders, found from anywhere: what RUN means can change later
        folder = find_folder(model, merged=True)
        return os.path.abspath(folder) if os.path.isdir(folder) and model not in NAMED_MODELS else folder

    own_code = tuple(map(locate, config.own_code))
    start = {"model": locate(config.model), "teacher": locate(config.teacher), "own_code": own_code}
    given = settings_of(TrainConfig, layers)  # with the defaults of the task set
    algorithm = with_correction(config.algorithm, config.trainer.dtype, config.engine.dtype, given)
    without = {"evaluate_every": 0, "stop_after": 0, "pass_k": 0, "pass_attempts": 0} if config.evaluate_n == 0 else {}
    return config.model_copy(update={"algorithm": algorithm, **start, **without})


class CriticConfig(BaseModel):
    """Settings of the training of a critic on the recorded attempts of a run."""

    section: ClassVar[str] = "Critic"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    run: str
    """Run whose attempts the critic learns from: a name in runs/, or a folder."""

    out: Path | None = None
    """Folder for the critic. An old critic in this folder is replaced. Empty: the subfolder "critic" of the run."""

    model: str = ""
    """Model that the critic starts from. Empty: the final model of the run that made the attempts, or the newest
    checkpoint if the run has no final model."""

    attempts: int = Field(default=0, ge=0)
    """Number of newest attempts to learn from; 0: all. The policy that the critic will guide should have made
    these attempts."""

    held_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of tasks that the critic is not trained on. The attempts at these tasks measure the critic."""

    epochs: int = Field(default=4, ge=1)
    """Passes over the attempts."""

    batch_size: int = Field(default=32, ge=1)
    """Attempts per optimizer step."""

    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    """Learning rate of AdamW at the first step. The rate falls linearly to 0."""

    reads_logprobs: bool = True
    """Whether the critic also reads the log-probability of each sampled token."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the held-out tasks and of the order of the attempts."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the critic: auto (a GPU if there is one), cpu, cuda, cuda:N."""

    threads: int = Field(default=1, ge=1, le=256)
    """Number of torch threads."""

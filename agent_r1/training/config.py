"""What can be set in training and in evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from agent_r1.config import Layer, resolve, restrict
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.renderers.config import TagsConfig
from agent_r1.rollout.config import ContextPolicyConfig
from agent_r1.sandbox.config import SandboxLevel
from agent_r1.tasksets.hub import is_hub
from agent_r1.trainer.config import TrainerConfig
from agent_r1.training.monitor.config import DoctorConfig


def located(data: Path) -> Path:
    """The same from whatever folder a run is looked at; a name on the hub stays as it is."""
    return data if is_hub(data) else data.absolute()


class WorldConfig(BaseModel):
    """What a world is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    data: Annotated[Path, AfterValidator(located)] | None = None
    """The file of questions, for worlds that read one; or hf:NAME, and for multi-hop worlds a mixture's TOML file."""

    corpus: str | None = None
    """What to search: a file of passages, a TOML file that describes a search, or a retrieval server's http://.."""

    sandbox: SandboxLevel | None = None
    """Where code runs that the policy wrote, in worlds that run it: bubblewrap (a container, their default) or none."""

    seed: int = Field(default=0, ge=0)
    """Fixes worlds, sampling and initial weights."""


class CheckConfig(WorldConfig):
    """A world that proves itself."""

    n: int = Field(default=50, ge=0)
    """Tasks per split, drawn at random; 0: all."""

    concurrency: int = Field(default=32, ge=1)
    """Episodes under way at the same time."""


class PlayConfig(WorldConfig):
    """An episode that a person plays."""

    split: str = ""
    """Where the task is from; empty: the first split of the table."""

    number: int | None = Field(default=None, ge=0)
    """Which task of the split, from 0; the seed draws one where none is given."""


class RunConfig(WorldConfig):
    """What training and evaluation share: the world, the model, and how it acts."""

    task: str = "tinywiki"
    """The world, one of those that ``agent-r1 tasks`` lists."""

    splits: tuple[str, ...] = ()
    """Columns of the table; empty: those that the world names."""

    model: str = ""
    """A Hugging Face name, a folder, or 'tiny-base'; for evaluation also a run. It has to be named."""

    max_tokens: int = Field(default=1024, ge=1)
    """New tokens per turn."""

    context: int = Field(default=8192, ge=2)
    """Tokens per episode: prompts, actions and what tools gave."""

    view: ContextPolicyConfig = ContextPolicyConfig()
    """The context rule."""

    tool_format: str = "auto"
    """How calls are written: auto (as the model's template does), hermes, qwen3.5, glm, llama3, deepseek, harmony,
    response (by the tokenizer's own response template), or tags, for models that know none."""

    tags: TagsConfig = TagsConfig()
    """Names in the tool format tags."""

    concurrency: int = Field(default=256, ge=1)
    """Episodes under way at the same time."""

    episode_seconds: float = Field(default=600.0, gt=0)
    """Seconds an episode may take; one that takes longer is dropped."""

    score_seconds: float = Field(default=600.0, gt=0)
    """Seconds a scorer may take for a group; past them the group is dropped."""

    pass_k: int = Field(default=0, ge=0)
    """The k of pass@k: of k sampled attempts one is right. 0: not measured. After training it is measured of the base
    model, over at most 50 questions per split."""

    pass_attempts: int = Field(default=0, ge=0)
    """Attempts per question from which pass@1 and pass@k are estimated without bias, at least k of them; 0: k."""

    retries: int = Field(default=2, ge=0)
    """Further attempts in the place of one whose environment or engine failed."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Where the model computes: auto (a GPU where there is one), cpu, cuda, cuda:N."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of the weights; log-probabilities are always computed in float32."""

    threads: int = Field(default=1, ge=1)
    """Threads of torch; results are equal bit for bit only where this is."""

    @field_validator("tags")
    @classmethod
    def _tags_are_used(cls, value: TagsConfig, info: ValidationInfo) -> TagsConfig:
        if value != TagsConfig() and info.data.get("tool_format") != "tags":
            raise ValueError("tags do nothing but with tool_format tags: give that, or leave them out")
        return value

    @field_validator("pass_attempts")
    @classmethod
    def _enough_attempts(cls, value: int, info: ValidationInfo) -> int:
        k = info.data.get("pass_k", 0)
        if value and not value >= k > 0:
            raise ValueError(f"give pass_k too, and at least so many attempts: pass_k is {k}")
        return value


class TrainConfig(RunConfig):
    """A training run. Defaults fit a model of 3B parameters; a world's recipe changes them to fit its own."""

    algorithm: str = "grpo"
    """One of those that ``agent-r1 algorithms`` lists, or a Row of yours as FILE.py:NAME."""

    row: dict[str, Any] = Field(default_factory=dict)
    """Terms of the algorithm, e.g. ``row.surrogate.high``; ``agent-r1 algorithms NAME`` shows them."""

    teacher: str = ""
    """The model that an algorithm of distillation learns from: a name or a folder."""

    trainer: TrainerConfig = TrainerConfig()
    """The optimizer."""

    doctor: DoctorConfig = DoctorConfig()
    """When a run is warned of, and stopped."""

    run: str = ""
    """The run's name, in runs/, or a folder for it; empty: one is made of task, algorithm and time."""

    steps: int = Field(default=200, ge=1)
    """Optimizer steps."""

    groups_per_step: int = Field(default=16, ge=1)
    """Tasks per optimizer step."""

    group_size: int = Field(default=8, ge=1)
    """Attempts per task."""

    max_staleness: int = Field(default=0, ge=0)
    """Optimizer steps that may lie between an attempt's oldest token and its update; 0 is synchronous."""

    temperature: float = Field(default=1.0, gt=0)
    """Of sampling in training; evaluation is greedy."""

    top_p: float = 1.0
    """Only 1 is taken."""

    top_k: int = 0
    """Only 0 is taken."""

    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weights by the name of a reward; one that is not named weighs 1, weight 0 ignores it."""

    evaluate_every: int = Field(default=0, ge=0)
    """Steps between evaluations on the validation split; 0: none."""

    evaluate_n: int = Field(default=200, ge=1)
    """Questions per split of each evaluation."""

    checkpoint_every: int = Field(default=5, ge=0)
    """Steps between checkpoints; 0: only the final model is saved, and a run that stops is resumed from its
    beginning."""

    checkpoint_keep: int = Field(default=2, ge=1)
    """Newest checkpoints to keep; the best by validation is kept beside them."""

    @field_validator("top_p", "top_k")
    @classmethod
    def _whole_distribution(cls, value: float, info: ValidationInfo) -> float:
        if info.field_name and value != cls.model_fields[info.field_name].default:
            raise ValueError("train on the whole distribution (top_p 1, top_k 0): cut sampling biases the ratio")
        return value


class EvalConfig(RunConfig):
    """An evaluation: a table of methods."""

    methods: tuple[str, ...] = ()
    """Rows of the table; empty: all."""

    n: int = Field(default=200, ge=1)
    """Questions per split."""


Settled = TypeVar("Settled", bound=RunConfig)


def settle(cls: type[Settled], layers: Sequence[Layer], world: TaskSet) -> Settled:
    """The configuration to run with in a world: the layers, the strongest first, over the world's recipe.

    Raises InvalidInput as :func:`agent_r1.config.resolve` does, and where nothing names a model.
    """
    recipe = restrict(Layer(f"recipe of {world.name}", world.recipe), cls, TrainConfig)
    config = resolve(cls, [*layers, recipe])
    if not config.model:
        raise InvalidInput("model", got="nothing", do="give --model: a Hugging Face name or a folder")
    return config

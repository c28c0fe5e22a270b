"""Settings of the inference engine. This module does not import torch, so that the command line stays fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from agent_r1.core.inference import Dtype

Backend = Literal["embedded", "vllm"]

DecodeStep = Literal["auto", "torch", "native"]

DecodeMethod = Literal["plain", "step", "beam"]


def _require_http(urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not an address: give one such as http://127.0.0.1:8000")
        if "@" in url:  # a run stores its settings, but must not store credentials
            raise ValueError("give addresses without user and password")
    if len(set(urls)) < len(urls):
        raise ValueError("a server is named twice")
    return urls


class VllmConfig(BaseModel):
    """The vLLM servers of a run: servers at ``urls``, or servers that the run starts with ``python``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    python: str = ""
    """Path of the Python interpreter in an environment with vLLM 0.32 or newer, such as /opt/vllm/bin/python. With this
    setting, the run starts vLLM servers on loopback, and stops them when the run ends. The number of these servers is
    engine.replicas."""

    urls: Annotated[tuple[str, ...], AfterValidator(_require_http)] = ()
    """Addresses of running servers, separated by commas, such as http://10.0.0.5:8000. docs/scaling.md lists the
    options that these servers need."""

    arguments: str = ""
    """Further command-line arguments for each server that the run starts, such as "--tensor-parallel-size 2"."""

    devices: tuple[str, ...] = ()
    """GPUs of the servers that the run starts: one entry per server, separated by commas. "1,2" is one GPU for each of
    two servers, and "1+2,3+4" is two GPUs for each of two servers. The numbers count the GPUs in CUDA_VISIBLE_DEVICES
    from 0. Without this setting, the servers take the GPUs after the trainer's GPUs."""

    weights_folder: Path | None = None
    """Folder through which the servers get the weights. All servers must be able to read this path. Without this
    setting, the weights go through /dev/shm, or through the folder for temporary files if /dev/shm is too small."""

    start_seconds: float = Field(default=900.0, gt=0)
    """Time limit for the start of the servers, and for each phase of an update of the weights, in seconds. A server
    whose update takes longer gets no requests until an update of its weights succeeds."""

    stall_seconds: float = Field(default=120.0, gt=0)
    """Time limit for the next answer of a server that has requests, in seconds. A server that takes longer gets no
    requests until an update of its weights succeeds."""

    @field_validator("urls")
    @classmethod
    def _require_one_source(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value and info.data.get("python"):
            raise ValueError("give engine.vllm.python to start servers, or engine.vllm.urls to use servers, not both")
        return value


class EngineConfig(BaseModel):
    """The inference engine: implementation, batch size, data type and memory."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    dtype: Dtype = "float32"
    """Data type of the engine's weights, activations and KV cache. Log-probabilities are computed in float32."""

    max_sequences: int = Field(default=64, ge=1)
    """Maximum number of sequences in one decode batch. The embedded engine adds decode batches while the KV cache has
    room. A vLLM server has at most this number of requests at a time."""

    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Memory for the KV cache, in GiB. If the memory is full, sequences wait. Without this setting, the cache gets: on
    a CPU, half of the available memory, at most 4 GiB; on a GPU, 30 % of the free memory; on a vLLM server, the
    server's own default."""

    backend: Backend = "embedded"
    """Where tokens are generated. ``embedded``: in the process of the run. ``vllm``: on vLLM servers."""

    decode_step: DecodeStep = "auto"
    """How the embedded engine computes decode steps: ``native`` (in C++), ``torch`` (in PyTorch), or ``auto``. The C++
    code is compiled on first use, and holds a copy of the weights. It supports Llama-like models on a CPU. ``auto``
    selects ``native`` if the C++ code supports the model, and otherwise ``torch``."""

    replicas: int = Field(default=1, ge=1, le=1024)
    """Number of vLLM servers that the run starts."""

    vllm: VllmConfig = Field(default=VllmConfig(), validate_default=True)
    """Settings of the vLLM servers."""

    @field_validator("decode_step")
    @classmethod
    def _require_embedded(cls, value: DecodeStep, info: ValidationInfo) -> DecodeStep:
        if value != "auto" and info.data.get("backend") != "embedded":
            raise ValueError("leave it out: it has an effect only with engine.backend embedded")
        return value

    @field_validator("replicas")
    @classmethod
    def _require_servers(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("backend") != "vllm":
            raise ValueError("several replicas need engine.backend vllm: the embedded engine is one")
        return value

    @field_validator("vllm")
    @classmethod
    def _require_backend(cls, value: VllmConfig, info: ValidationInfo) -> VllmConfig:
        is_vllm, replicas = info.data.get("backend") == "vllm", info.data.get("replicas", 1)
        if value != VllmConfig() and not is_vllm:
            raise ValueError(
                "these settings have an effect only with engine.backend vllm: give that, or leave them out"
            )
        if is_vllm and not (value.python or value.urls):
            raise ValueError("give engine.vllm.python to start servers, or engine.vllm.urls to use servers that run")
        if value.urls and replicas > 1:
            raise ValueError("leave out engine.replicas: each of engine.vllm.urls is a replica")
        if value.devices and len(value.devices) != replicas:
            raise ValueError(f"engine.vllm.devices has {len(value.devices)} entries for {replicas} replicas")
        return value


class DecodeConfig(BaseModel):
    """How actions are sampled: from the policy alone, or guided by the values of a critic."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    method: DecodeMethod = "plain"
    """Method of sampling actions: ``plain`` (the policy alone), ``step`` (chooses among several sampled actions) or
    ``beam`` (keeps the best conversations). See docs/models.md."""

    critic: str = ""
    """The critic whose values guide the sampling: a folder that 'agent-r1 train-critic' wrote, or a run of an algorithm
    with a critic, such as ppo."""

    candidates: int = Field(default=4, ge=1)
    """Number of actions among which the critic's values choose. 1: plain decoding."""

    beta: float = Field(default=0.1, ge=0)
    """Temperature of the values, in units of the reward: a candidate with the predicted reward Q has the weight exp(Q /
    beta). 0: the candidate with the largest Q is chosen."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of candidates 2, 3 and so on if the policy is greedy, because greedy candidates would all be
    equal. A policy that is not greedy uses its own temperature for all candidates."""

    beams: int = Field(default=2, ge=1)
    """If ``decode.method`` is ``beam``: the number of conversations that are kept after each turn. The candidates are
    divided equally among the conversations: with 4 candidates and 2 beams, each conversation gets 2 new actions."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.method == "plain" and any(dict(self)[n] != f.default for n, f in type(self).model_fields.items()):
            raise ValueError("these settings have an effect only with decode.method step or beam: give one")
        if self.method != "plain" and not self.critic:
            raise ValueError("give decode.critic: a folder of 'agent-r1 train-critic', or a run with a critic")
        if self.method == "beam" and self.candidates % self.beams:
            raise ValueError("give a multiple of decode.beams as decode.candidates")
        return self

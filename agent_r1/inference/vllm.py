"""A client of one vLLM server.

The client sends token ids, and receives token ids with log-probabilities. Weights go to the server through folders. The
server must be vLLM 0.32 or newer, with ``SERVER_OPTIONS``.
"""

from __future__ import annotations

import math
import secrets
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    AdapterFolders,
    Canary,
    Capabilities,
    Completion,
    Dtype,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    Transport,
    WeightUpdate,
)
from agent_r1.core.redaction import redact_url
from agent_r1.core.threads import run_in_thread
from agent_r1.inference.canary import NUM_COMPARED, TEMPERATURE, CanaryReading, CanaryResult, find_mismatch
from agent_r1.inference.pool import Piece, generate_in_pieces
from agent_r1.inference.server_process import CONNECT_SECONDS, ReplicaError, ServerClient
from agent_r1.inference.vllm_worker import agent_r1_weights
from agent_r1.inference.vllm_worker.agent_r1_weights import CHECKSUM
from agent_r1.model.weights import product_precision


class Answer(BaseModel):
    """Base class for parts of a server's JSON answers. Undeclared fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


A = TypeVar("A", bound=Answer)


def read_answer(cls: type[A], response: httpx.Response, server: str) -> A:
    """Return the JSON of an answer of ``server``. Raise ReplicaError if it does not fit ``cls``."""
    try:
        return cls.model_validate_json(response.content)
    except ValidationError as error:
        raise ReplicaError(f"its answer is not {server}'s: {error.errors()[0]['msg']}") from error


def check_sampled(
    tokens: Sequence[int], scored: Sequence[tuple[int, float]], finish_reason: str, params: SamplingParams
) -> tuple[float, ...]:
    """Return the log-probabilities of the sampled ``tokens``. Raise ReplicaError if the answer is not valid."""
    logprobs = tuple(logprob for _, logprob in scored)
    if [token for token, _ in scored] != list(tokens) or len(tokens) > params.max_tokens:
        raise ReplicaError("its tokens and log-probabilities do not belong together")
    if not all(math.isfinite(each) and each <= 1e-3 for each in logprobs):
        raise ReplicaError("a log-probability is positive or not finite")
    if finish_reason != "abort" and not tokens:
        raise ReplicaError(f"a request ended with {finish_reason!r} and without tokens")
    return logprobs


class CanaryCheck:
    """Compares a server's log-probabilities with the trainer's, for each version of the weights."""

    def __init__(self, dtype: Dtype) -> None:
        self._dtype = dtype
        self._passed: CanaryResult | None = None  # the last result that matched

    async def verify(self, canary: Canary, read: Callable[[tuple[int, ...]], Awaitable[CanaryReading]]) -> None:
        """Raise ReplicaError if the server's log-probabilities differ from ``canary`` by more than rounding errors."""
        result = CanaryResult(canary, tuple([await read(prompt.token_ids) for prompt in canary]))
        if mismatch := find_mismatch(result, self._passed, product_precision(self._dtype)):
            raise ReplicaError(f"it does not serve the weights that it was sent: {mismatch}")
        self._passed = result


SERVER_OPTIONS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
"""They switch on the endpoint for token ids, log-probabilities at the sampling temperature, and vLLM's own defaults."""

SERVER_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pauses and weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # adapters
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of every server. The variable for adapters has no effect without the option --enable-lora."""

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for the option --max-lora-rank."""

NO_ADAPTERS = "--no-enable-lora"  # if the user gives this option, the servers load weights with the adapter merged

KEPT_ADAPTERS = 2  # the newest adapter, and the one before it, which older requests still use


def adapter_options(rank: int, arguments: str) -> tuple[str, ...]:
    """Return the options with which a vLLM server accepts LoRA adapters of the rank ``rank``."""
    if rank == 0 or rank > ADAPTER_RANKS[-1] or NO_ADAPTERS in shlex.split(arguments):
        return ()
    limit = next(limit for limit in ADAPTER_RANKS if rank <= limit)
    return "--enable-lora", "--max-lora-rank", str(limit), "--max-loras", str(KEPT_ADAPTERS)


LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

GENERATE, COLLECTIVE_RPC = "/inference/v1/generate", "/collective_rpc"

WORKER_FOLDER = Path(agent_r1_weights.__file__).parent
CHECKSUM_OPTIONS = ("--worker-extension-cls", f"{agent_r1_weights.__name__.rpartition('.')[2]}.CheckedWeights")
"""With these options, and ``WORKER_FOLDER`` on PYTHONPATH, a server reports a checksum of the weights that it loads."""


@dataclass(frozen=True, slots=True)
class _Served:
    """The model of a request: the server's own (version None), or a version of its adapter."""

    name: str
    version: int | None = None


class _Logprob(Answer):
    logprob: float


class _TokenLogprob(_Logprob):
    token_id: int
    top_logprobs: tuple[_TokenLogprob, ...] = ()


class _Logprobs(Answer):
    content: tuple[_TokenLogprob, ...] = ()


class _VersionSpan(Answer):
    version: str
    start: int
    end: int


class _Choice(Answer):
    token_ids: tuple[int, ...] = ()
    finish_reason: Literal["stop", "length", "abort"]
    logprobs: _Logprobs | None = None
    weight_versions: list[_VersionSpan] | None = None


class _Generated(Answer):
    choices: list[_Choice]
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class _CacheReset(Answer):
    success: bool


class _Results(Answer):
    results: list[str]  # of each worker of the server


class VllmEngine:
    """An ``InferenceEngine`` over the vLLM server at ``url``, which serves ``model`` in ``dtype``.

    All methods raise ReplicaError if the server failed, and EngineError if the server refuses the request.
    """

    def __init__(
        self,
        url: str,
        model: str,
        max_context: int,
        dtype: Dtype = "float32",
        update_seconds: float = 600.0,
        *,
        adapters: bool = False,
        reports_checksums: bool = False,
        deliver: Callable[[Path], None] | None = None,  # copies a folder to the server's machine before it is read
    ) -> None:
        self.name = redact_url(url)
        self._reports_checksums, self._deliver = reports_checksums, deliver
        self._dtype, self._max_context, self._update_seconds = dtype, max_context, update_seconds
        self._transports = frozenset[Transport]({"safetensors", "lora"} if adapters else {"safetensors"})
        self._canary = CanaryCheck(dtype)
        self._model = self._served = self._staged = _Served(model)
        self._weights: Path | None = None  # the folder of the server's own model; None if unknown
        self._adapters: list[str] = []  # the names of the loaded adapters, the oldest one first
        # A name that is loaded again is refused, and keeps its old weights, also if another run loaded it.
        self._prefix = f"{model}-{secrets.token_hex(4)}-"
        self._num_adapters = 0
        self._client = ServerClient(url, GENERATE)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self._transports, self._max_context, dtype=self._dtype, checksum=False)

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        """Return a completion. If the caller is cancelled, the server stops sampling."""
        return await generate_in_pieces(self.request, prompt, params)

    async def request(self, prompt: Prompt, params: SamplingParams) -> Piece:
        if prompt.media:  # vLLM's API takes images only in an internal format, not as files
            raise EngineError("a vLLM server reads no images here; sample images with --engine.backend embedded")
        if params.top_p != 1.0:
            raise EngineError("vLLM's log-probabilities are of the truncated distribution: give top_p 1")
        condition = params.stop_condition
        sampling: dict[str, Any] = {
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "stop_token_ids": params.stop_token_ids,
            "ignore_eos": True,  # generations end at ``stop_token_ids`` only, whatever the model's configuration names
            "seed": params.seed,
            "logprobs": 0,  # of the sampled token alone
        }
        if condition is not None and condition.strings:
            sampling |= {"stop": condition.strings, "include_stop_str_in_output": True}
        served = self._served
        piece = _piece(await self._generate(prompt, sampling, served), params)
        if served.version is None or not piece.token_ids:
            return piece
        # The server names its newest weights. A request that arrives after an update still gets the adapter it named.
        return replace(piece, version_spans=(PolicyVersionSpan(0, served.version),))

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        await self.stage(update)
        await self.commit(update.version)
        await self.verify(update.canary)
        return update.version

    async def stage(self, update: WeightUpdate) -> None:
        """Pause the server, and load the weights. The server samples no token until :meth:`commit`.

        vLLM cannot change the adapter of a running request, so such requests are aborted.
        """
        if update.transport not in self._transports:
            raise EngineError(f"this server takes {sorted(self._transports)}, got {update.transport!r}")
        if isinstance(update.handle, AdapterFolders):
            folders = [update.handle.adapter] if self._weights == update.handle.base else list(astuple(update.handle))
            await self._make_visible(*folders)
            await self._client.post("/pause", params={"mode": "abort"})
            if self._weights != update.handle.base:
                await self._load_weights(update.handle.base)
            await self._load_adapter(update.handle.adapter, update.version.number)
        else:
            await self._make_visible(Path(str(update.handle)))  # before the pause: the server samples meanwhile
            await self._client.post("/pause", params={"mode": "keep"})
            await self._load_weights(Path(str(update.handle)))
            self._staged = self._model

    async def _make_visible(self, *folders: Path) -> None:
        if self._deliver is not None:
            for folder in folders:
                await run_in_thread(self._deliver, folder)

    async def _load_weights(self, folder: Path) -> None:
        self._weights = None
        if self._reports_checksums:
            answer = await self._call("load_checked_weights", folder=str(folder))
            expected = (folder / CHECKSUM).read_text("ascii")
            if set(read_answer(_Results, answer, "vLLM").results) != {expected}:
                raise ReplicaError(f"it loaded other weights than those in {folder}")
        else:
            await self._call("reload_weights", weights_path=str(folder))
        self._weights = folder

    async def _call(self, method: str, **options: str) -> httpx.Response:
        body = {"method": method, "kwargs": options}
        return await self._client.post(COLLECTIVE_RPC, body, seconds=self._update_seconds)

    async def _load_adapter(self, folder: Path, version: int) -> None:
        self._num_adapters += 1
        name = f"{self._prefix}{self._num_adapters}"
        load = {"lora_name": name, "lora_path": str(folder)}
        await self._client.post(LOAD_ADAPTER, load, seconds=self._update_seconds)
        self._adapters.append(name)
        self._staged = _Served(name, version)

    async def _unload_adapters(self, kept: int) -> None:
        # Ignore errors, because unloading fails if the server was restarted and has no adapters.
        while len(self._adapters) > kept:
            with suppress(ReplicaError):
                await self._client.post(UNLOAD_ADAPTER, {"lora_name": self._adapters.pop(0)}, seconds=CONNECT_SECONDS)

    async def commit(self, version: PolicyVersion) -> None:
        """Set the version of the loaded weights, drop cached keys and values, and let the server continue."""
        self._served = self._staged
        await self._client.post("/update_weight_version", {"new_version": str(version.number)})
        reset = await self._client.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not read_answer(_CacheReset, reset, "vLLM").success:
            raise ReplicaError("it keeps the keys and values of older weights")
        await self._client.post("/resume")
        await self._unload_adapters(KEPT_ADAPTERS)

    async def verify(self, canary: Canary) -> None:
        await self._canary.verify(canary, self._read)

    async def check_health(self) -> None:
        await self._client.get("/health", seconds=CONNECT_SECONDS)

    async def probe(self) -> None:
        await self._generate(Prompt((0,)), {"max_tokens": 1}, self._model)

    async def recover(self) -> None:
        self._weights = None  # it can have been restarted
        await self.check_health()
        await self._client.post("/resume")
        await self.probe()

    async def release(self, session_id: str) -> None:
        """Do nothing, because vLLM itself drops old keys and values from its prefix cache."""

    async def close(self) -> None:
        await self._unload_adapters(0)
        await self._client.close()

    async def _read(self, token_ids: tuple[int, ...]) -> CanaryReading:
        prompt, sampling = Prompt(token_ids), {"max_tokens": 1, "temperature": TEMPERATURE, "seed": 0}
        sampled = await self._generate(prompt, {**sampling, "logprobs": NUM_COMPARED + 1}, self._served)
        scored = await self._generate(prompt, {**sampling, "prompt_logprobs": 0}, self._served)
        choice, scores = sampled.choices[0], scored.prompt_logprobs
        if choice.logprobs is None or len(choice.logprobs.content) != 1 or len(scores or ()) != len(token_ids):
            raise ReplicaError("its answer lacks log-probabilities")
        found = [score.get(token) if score else None for score, token in zip(scores or (), token_ids, strict=True)][1:]
        # vLLM lists the sampled token first, and may list it again among the most likely tokens
        listed = {each.token_id: each.logprob for each in choice.logprobs.content[0].top_logprobs}
        if len(listed) < NUM_COMPARED:
            raise ReplicaError(f"its answer has {len(listed)} of the {NUM_COMPARED} most likely tokens")
        following = dict(sorted(listed.items(), key=lambda pair: -pair[1])[:NUM_COMPARED])
        return CanaryReading(tuple(math.nan if each is None else each.logprob for each in found), following)

    async def _generate(self, prompt: Prompt, sampling: Mapping[str, Any], served: _Served) -> _Generated:
        body = {"model": served.name, "token_ids": prompt.token_ids, "sampling_params": sampling}
        generated = read_answer(_Generated, await self._client.post(GENERATE, body, seconds=None), "vLLM")
        if not generated.choices:
            raise ReplicaError("its answer has no completion")
        return generated


def _piece(generated: _Generated, params: SamplingParams) -> Piece:
    choice = generated.choices[0]
    content = () if choice.logprobs is None else choice.logprobs.content
    scored = [(each.token_id, each.logprob) for each in content]
    logprobs = check_sampled(choice.token_ids, scored, choice.finish_reason, params)
    return Piece(choice.token_ids, logprobs, _version_spans(choice), choice.finish_reason)


def _version_spans(choice: _Choice) -> tuple[PolicyVersionSpan, ...]:
    spans = choice.weight_versions or []
    ends = [0, *(span.end for span in spans)]
    if not choice.token_ids:
        return ()
    if [span.start for span in spans] != ends[:-1] or ends[-1] != len(choice.token_ids):
        raise ReplicaError("its answer does not state which weights sampled each token (vLLM 0.32 or newer does)")
    if not all(span.version.isdecimal() for span in spans):
        raise ReplicaError(f"it serves the weights {spans[-1].version!r}, which this run did not send")
    return tuple(PolicyVersionSpan(span.start, int(span.version)) for span in spans)

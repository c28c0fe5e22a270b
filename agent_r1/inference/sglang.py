"""A client of one SGLang server.

The client sends token ids, and receives token ids with log-probabilities. The client uses the native API of SGLang 0.5,
and was not yet tested with a real server. Three properties of SGLang matter here:

- An answer names only one version of the weights. So an update of the weights aborts the running requests, and
  ``generate`` continues each aborted request with a new request.
- The option ``ignore_eos`` also switches off ``stop_token_ids``, so the client does not set ``ignore_eos``. A server
  can therefore stop at an end token that is not in ``stop_token_ids``. Then ``generate`` continues with a new request.
- If a request lacks a sampling parameter, the server takes the parameter from the model's ``generation_config.json``.
  So each request has all sampling parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    Canary,
    Capabilities,
    Completion,
    Dtype,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.inference.canary import NUM_COMPARED, TEMPERATURE, CanaryReading
from agent_r1.inference.pool import Piece, generate_in_pieces
from agent_r1.inference.server_process import ReplicaError, ServerClient
from agent_r1.inference.vllm import Answer, CanaryCheck, check_sampled, most_likely, read_answer

GENERATE = "/generate"

HEALTH_SECONDS = 30.0
"""The time limit for a health check, in seconds. In a health check, an SGLang server samples a token. The server's own
time limit for this token is 20 s."""

MAX_SEED = 2**31

WHOLE_DISTRIBUTION: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Sampling parameters that exclude no token and change no probability."""

TokenLogprob = tuple[float | None, int, str | None]
"""A token of a prompt or of a completion, in a response of an SGLang server: (log-probability, token id, text).

The log-probability is None for the first token of a prompt.
"""


class _FinishReason(Answer):
    type: Literal["stop", "length", "abort"]


class _Meta(Answer):
    finish_reason: _FinishReason
    weight_version: str | None = None
    input_token_logprobs: list[TokenLogprob] | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None


class _Generated(Answer):
    output_ids: tuple[int, ...] = ()
    meta_info: _Meta


class _Update(Answer):
    success: bool
    message: str = ""


class SglangEngine:
    """An ``InferenceEngine`` that sends requests to the SGLang server at ``url``.

    Args:
        max_context: maximum number of tokens of a prompt and its completion together.
        dtype: the data type in which the server serves the weights.
        update_seconds: the time limit for loading weights.

    All methods raise ReplicaError if the server failed, and EngineError if the server refuses the request.
    """

    def __init__(self, url: str, max_context: int, dtype: Dtype = "float32", update_seconds: float = 600.0) -> None:
        self._dtype, self._max_context, self._update_seconds = dtype, max_context, update_seconds
        self._canary = CanaryCheck(dtype)
        self._client = ServerClient(url, GENERATE)

    @property
    def name(self) -> str:
        return self._client.name

    @property
    def capabilities(self) -> Capabilities:
        transports = frozenset[Literal["safetensors"]]({"safetensors"})
        return Capabilities(transports, self._max_context, top_logprobs=True, dtype=self._dtype, checksum=False)

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        """Return a completion. If the caller is cancelled, the server stops sampling."""
        return await generate_in_pieces(self.request, prompt, params)

    async def request(self, prompt: Prompt, params: SamplingParams) -> Piece:
        if prompt.media:
            raise EngineError("an SGLang server reads no images here; sample images with --engine.backend embedded")
        if params.top_p != 1.0 or params.top_k != 0:
            raise EngineError("SGLang's log-probabilities ignore top_p and top_k: give top_p 1 and top_k 0")
        condition = params.stop_condition
        sampling: dict[str, Any] = {
            "temperature": params.temperature,
            "max_new_tokens": params.max_tokens,
            "stop_token_ids": params.stop_token_ids,
            "sampling_seed": params.seed % MAX_SEED,  # used by servers with --enable-deterministic-inference only
        }
        if condition is not None and condition.strings:
            sampling |= {"stop": condition.strings}
        return _piece(await self._generate(prompt, sampling, top_logprobs_num=params.top_logprobs), params)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        await self.stage(update)
        await self.commit(update.version)
        await self.verify(update.canary)
        return update.version

    async def stage(self, update: WeightUpdate) -> None:
        """Abort the running requests, and load the weights. The server samples no token until :meth:`commit`."""
        if update.transport != "safetensors":
            raise EngineError(f"SGLang takes a folder of safetensors, got {update.transport!r}")
        await self._client.post("/pause_generation", {"mode": "abort"}, seconds=self._update_seconds)
        load = {
            "model_path": str(update.handle),
            "weight_version": str(update.version.number),
            "flush_cache": True,  # keys and values of older weights
        }
        response = await self._client.post("/update_weights_from_disk", load, seconds=self._update_seconds)
        loaded = read_answer(_Update, response, "SGLang")
        if not loaded.success:
            raise ReplicaError(f"it did not load the weights: {loaded.message}")

    async def commit(self, version: PolicyVersion) -> None:
        """Let the server sample again. :meth:`stage` has already set the version of the weights."""
        await self._client.post("/continue_generation", {})

    async def verify(self, canary: Canary) -> None:
        await self._canary.verify(canary, self._read)

    async def check_health(self) -> None:
        await self._client.get("/health", seconds=HEALTH_SECONDS)

    async def probe(self) -> None:
        await self._generate(Prompt((0,)), {"max_new_tokens": 1})

    async def recover(self) -> None:
        """Let the server sample again after a pause, and request one token to test the server."""
        await self._client.post("/continue_generation", {})
        await self.probe()

    async def release(self, session_id: str) -> None:
        """Do nothing, because SGLang itself drops old keys and values from its prefix cache."""

    async def close(self) -> None:
        await self._client.close()

    async def _read(self, token_ids: tuple[int, ...]) -> CanaryReading:
        prompt, sampling = Prompt(token_ids), {"max_new_tokens": 1, "temperature": TEMPERATURE}
        following = await self._generate(prompt, sampling, top_logprobs_num=NUM_COMPARED)
        scored = await self._generate(prompt, sampling, logprob_start_len=0)
        top, scores = following.meta_info.output_top_logprobs, scored.meta_info.input_token_logprobs or []
        if not top or not top[0] or [token for _, token, _ in scores] != list(token_ids):
            raise ReplicaError("its answer lacks log-probabilities")
        logprobs = tuple(math.nan if score is None else score for score, _, _ in scores[1:])
        return CanaryReading(logprobs, dict(most_likely(_scores(top[0]), NUM_COMPARED)))

    async def _generate(self, prompt: Prompt, sampling: Mapping[str, Any], **options: int) -> _Generated:
        body = {
            "input_ids": prompt.token_ids,
            # the tokens at which a generation stops are returned too
            "sampling_params": {**WHOLE_DISTRIBUTION, "no_stop_trim": True, "skip_special_tokens": False, **sampling},
            "return_logprob": True,
            **options,
        }
        return read_answer(_Generated, await self._client.post(GENERATE, body, seconds=None), "SGLang")


def _scores(top: list[TokenLogprob] | None) -> dict[int, float]:
    return {token: score for score, token, _ in top or [] if score is not None}


def _piece(generated: _Generated, params: SamplingParams) -> Piece:
    meta, tokens = generated.meta_info, generated.output_ids
    reason = meta.finish_reason.type
    scored = [(token, math.nan if score is None else score) for score, token, _ in meta.output_token_logprobs or []]
    logprobs = check_sampled(tokens, scored, reason, params)
    version = meta.weight_version or ""
    if tokens and not version.isdecimal():
        raise ReplicaError(f"it serves the weights {version!r}, which this run did not send")
    tops = meta.output_top_logprobs or []
    if params.top_logprobs and len(tops) != len(tokens):
        raise ReplicaError("its answer lacks the most likely tokens")
    top = tuple(most_likely(_scores(each), params.top_logprobs) for each in tops) if params.top_logprobs else ()
    spans = (PolicyVersionSpan(0, int(version)),) if tokens else ()
    return Piece(tokens, logprobs, spans, reason, top)

"""The embedded inference engine: continuous batching in the process of the run, for causal LMs of transformers.

In a loop, the scheduler assigns slots of the KV cache to requests, and the model runner prefills new tokens and decodes
one token of every running sequence.

A sequence gets exactly the same tokens and log-probabilities, whatever other sequences run in the batch. Its random
numbers depend only on its seed, and its arithmetic only on its tokens (see ``inference.kv_cache``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.core.errors import EngineError, UnsupportedChat
from agent_r1.core.inference import Capabilities, Completion, Prompt, SamplingParams
from agent_r1.core.profile import NO_PROFILER, Part, Profiler
from agent_r1.core.tasks import shared_task
from agent_r1.core.threads import WorkerThread, settle
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.inference.cache_pages import cache_size
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.image_cache import ImageCache
from agent_r1.inference.model_runner import ModelRunner, probe_kv_bytes_per_token
from agent_r1.inference.native_decode import choose_native
from agent_r1.inference.sampling import likeliest, sample_tokens
from agent_r1.inference.scheduler import Request, Scheduler
from agent_r1.model.adapter import load_trained_weights, trained_weights
from agent_r1.model.onednn import use_plain_products
from agent_r1.model.vision import ImageProcessor
from agent_r1.model.weights import DTYPES, cast_parameters, weights_checksum

log = logging.getLogger(__name__)


class TorchEngine:
    """An ``InferenceEngine`` in this process.

    The engine takes ownership of the model: it casts the weights to ``config.dtype``, and a weight update copies new
    weights into the model. Forward passes run in a worker thread.

    Args:
        model: the model to serve, on the device on which it runs.
        context: maximum number of tokens of a prompt and its completion together.
        images: the image processor of the model; None if the model has no vision.

    Raises:
        InvalidInput: the model does not work with the KV cache, or with the decode step that ``config`` demands.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: int,
        config: EngineConfig | None = None,
        profiler: Profiler = NO_PROFILER,
        images: ImageProcessor | None = None,
    ) -> None:
        config = config or EngineConfig()
        bytes_per_token = probe_kv_bytes_per_token(model) * DTYPES[config.dtype].itemsize // model.dtype.itemsize
        cast_parameters(model, config.dtype)  # after the probe, which needs precise weights
        use_plain_products(model)  # the trainer's products can be oneDNN's: an engine has those of a loaded model
        self._context, self._dtype, self._profiler = context, config.dtype, profiler
        self._images = None if images is None else ImageCache(model, images)
        native = choose_native(config.decode_step, model)
        self.decode_step = "torch" if native is None else str(native)
        size = cache_size(config, context, bytes_per_token, model.device, is_native=native is not None)
        self._runner = ModelRunner(model, size.rows, self._images, native, size.capacity)
        self._scheduler = Scheduler(
            *(size.rows, size.blocks, size.pages, size.session_pages),
            *(self._runner.add_block, self._runner.prefill_shape.chunk),
        )
        self._updates: list[tuple[WeightUpdate, asyncio.Future[PolicyVersion]]] = []
        self._worker = WorkerThread("engine", lambda: EngineError("the engine's thread has ended"))
        self._driver: asyncio.Task[None] | None = None
        self._num_anonymous = 0
        self._is_closed = False
        self.num_generated_tokens = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            frozenset({"shared_memory"}),
            self._context,
            deterministic=True,
            max_sessions=self._scheduler.max_sessions,
            top_logprobs=True,
            media=self._images is not None,
            dtype=self._dtype,
        )

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        """Return a completion of the prompt. Raise EngineError if an argument is invalid or the generation fails.

        The keys and values stay in the KV cache for later prompts of the session. If the caller is cancelled, the
        generation ends before the next decode step.
        """
        tokens = self._validated_tokens(prompt, params)
        self._num_anonymous += session_id is None
        session = session_id or f"anonymous {self._num_anonymous}"
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = Request(tokens, params, session, future, random.Random(params.seed))
        request.shift = 0 if self._images is None else self._images.shift(tokens)
        self._scheduler.add(request)
        self._wake()
        try:
            return await future
        finally:
            request.is_cancelled = True
            if self._images is not None:
                self._images.release(prompt)
            if session_id is None:
                await self.release(session)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        """Copy the weights of the module ``update.handle`` into the engine's model, and return the version now served.

        Running sequences keep their tokens, and later tokens are recorded with the new version. Raise EngineError if
        the weights cannot be copied.
        """
        if update.transport != "shared_memory" or not isinstance(update.handle, torch.nn.Module):
            raise EngineError(f"the embedded engine takes a module in shared memory, got {update.transport!r}")
        if self._is_closed:
            raise EngineError("the engine was closed")
        future: asyncio.Future[PolicyVersion] = asyncio.get_running_loop().create_future()
        self._updates.append((update, future))
        self._wake()
        return await future

    async def release(self, session_id: str) -> None:
        """Free the session's slot of the KV cache. An unfinished generation of the session fails with EngineError."""
        for request in self._scheduler.requests:
            if request.session_id == session_id and not request.is_cancelled:
                request.is_cancelled, request.error = True, "the session was released"
                _resolve(request)
        self._scheduler.release(session_id)
        if not self._is_closed:
            self._wake()

    async def close(self) -> None:
        """Stop the engine after the current decode step.

        Unfinished calls of :meth:`generate` and :meth:`update_weights` fail with EngineError. The method waits at most
        one minute for the thread that runs the decode steps.
        """
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail_all("the engine was closed")
        await self._worker.close_and_wait()

    def _validated_tokens(self, prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens of a prompt, with negative numbers for features of images (see ``inference.image_cache``).

        Raise EngineError if the prompt or the parameters are invalid, or if the engine was closed.
        """
        if self._is_closed:
            raise EngineError("the engine was closed")
        if not prompt.token_ids:
            raise EngineError("a prompt needs at least one token")
        if params.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, got {params.max_tokens}")
        if len(prompt.token_ids) + params.max_tokens > self._context:
            raise EngineError(
                f"{len(prompt.token_ids)} prompt tokens and max_tokens={params.max_tokens} exceed "
                f"the context of {self._context} tokens"
            )
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < self._runner.vocab_size:
            raise EngineError(f"a token of the prompt is outside the vocabulary of {self._runner.vocab_size}")
        if not prompt.media:
            return prompt.token_ids
        if self._images is None:
            raise EngineError("the model has no vision, but the prompt has images")
        if prompt.media[-1].indices[-1] == len(prompt.token_ids) - 1:
            raise EngineError("the prompt ends with an image; a prompt has to end with text")
        try:
            return self._images.tokens(prompt)
        except UnsupportedChat as error:
            raise EngineError(str(error)) from error

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = shared_task(self._drive())

    async def _drive(self) -> None:
        """Run decode steps in the worker thread until no work is left.

        Between two steps, weights are updated and requests are scheduled.
        """
        try:
            while True:
                await self._apply_updates()
                if self._images is not None:
                    self._images.drop_unused()  # before cancelled requests leave: each request that runs has its images
                if not self._scheduler.schedule():
                    return
                for request in await self._worker.run(self._step):
                    _resolve(request)
        except EngineError as error:
            self._fail_all(str(error))
        except Exception as error:
            log.warning("the engine stopped", exc_info=error)
            self._fail_all(f"the engine stopped: {type(error).__name__}: {error}")

    def _step(self) -> list[Request]:
        """Prefill what the KV cache lacks, and sample a token for each running sequence. Return the ended requests."""
        try:
            with self._profiler.measure(Part.PREFILL):
                plan = self._scheduler.plan_prefill()
                self._runner.empty(plan.emptied)
                self._runner.prefill(plan.compute)
                self._runner.copy_prefixes(plan.prefix_copies)
                self._runner.prefill(plan.remainders)
                self._runner.copy_prefixes(plan.copies)
            for block, batch in self._scheduler.decode_batches():
                requests = [request for _, request in batch]
                with self._profiler.measure(Part.GENERATION):
                    last = {row: request.last_token for row, request in batch}
                    shifts = {row: request.shift for row, request in batch if request.shift}
                    logits = self._runner.decode(block, last, shifts)  # (N, V)
                with self._profiler.measure(Part.SAMPLING):
                    params, uniform = [one.params for one in requests], [one.random.random() for one in requests]
                    tokens, logprobs = sample_tokens(logits, params, uniform)  # (N,), (N,)
                    sampled = zip(requests, logits, tokens.tolist(), logprobs.tolist(), strict=True)
                    for request, logits_of_row, token, logprob in sampled:
                        _postprocess(request, logits_of_row, token, logprob)
                self.num_generated_tokens += len(batch)
        except Exception as error:
            self._scheduler.fail_running(f"{type(error).__name__}: {error}")
        return self._scheduler.take_finished()

    async def _apply_updates(self) -> None:
        while self._updates:
            update, future = self._updates[0]  # the update stays in the list, so that close() can fail it
            try:
                settle(future, await self._worker.run(self._load_weights, update), None)
            except EngineError as error:
                settle(future, None, error)
            except Exception as error:
                settle(future, None, EngineError(f"the weights do not fit the engine's model: {error}"))
            self._updates.pop(0)

    def _load_weights(self, update: WeightUpdate) -> PolicyVersion:
        assert isinstance(update.handle, torch.nn.Module)
        with torch.no_grad():
            load_trained_weights(self._runner.model, trained_weights(update.handle))
        self._scheduler.on_new_weights(update.version.number)
        if self._images is not None:
            self._images.on_new_weights()
        if update.version.checksum is None:
            return update.version
        return replace(update.version, checksum=weights_checksum(self._runner.model))

    def _fail_all(self, reason: str) -> None:
        for request in self._scheduler.requests:
            request.error = reason
            _resolve(request)
        for _, future in self._updates:
            settle(future, None, EngineError(reason))


def _postprocess(request: Request, logits: Tensor, token: int, logprob: float) -> None:
    """Append a token, sampled from ``logits`` (V,), to the request.

    Set ``finish_reason`` if the request is then complete.
    """
    if not math.isfinite(logprob):
        request.error = f"the model gave a log-probability of {logprob}: its weights or logits are not finite"
        return
    params = request.params
    if request.first_token_seconds is None:
        request.first_token_seconds = perf_counter() - request.start
    request.token_ids.append(token)
    request.logprobs.append(logprob)
    if params.top_logprobs:
        request.top_logprobs.append(likeliest(logits, params.temperature, params.top_logprobs))
    if params.on_tokens is not None:
        params.on_tokens(request.token_ids)
    try:
        is_stop = token in params.stop_token_ids or (
            params.stop_condition is not None and params.stop_condition.is_met(request.token_ids)
        )
    except Exception as error:  # user code fails only this request
        request.error = f"the stop condition raised {type(error).__name__}: {error}"
        return
    if is_stop:
        request.finish_reason = "stop"
    elif len(request.token_ids) >= params.max_tokens:
        request.finish_reason = "length"


def _resolve(request: Request) -> None:
    if request.error is not None:
        settle(request.future, None, EngineError(request.error))
    else:
        spans, reason = tuple(request.version_spans), request.finish_reason or "cancelled"
        completion = Completion(
            *(tuple(request.token_ids), tuple(request.logprobs), reason, spans, tuple(request.top_logprobs)),
            first_token_seconds=request.first_token_seconds,
            prefilled_tokens=request.prefilled_tokens,
        )
        settle(request.future, completion, None)

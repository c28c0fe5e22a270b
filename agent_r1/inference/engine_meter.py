"""Counters of the work of an engine: requests, tokens, and busy time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    PolicyVersion,
    Prompt,
    SamplingParams,
    WeightUpdate,
)


class EngineMeter:
    """Thread-safe counters of the work of an engine: requests, tokens and busy time. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._running = 0  # requests that the engine is working on
        self._last = self._began = clock()
        self._reset()

    def _reset(self) -> None:
        self._requests = self._generated = self._prompt = self._prefilled = 0
        self._reports_prefill = False
        self._busy = self._request_seconds = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Return a context manager that counts a running request during its ``with`` block."""
        with self._lock:
            self._advance()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._running -= 1

    def count(self, prompt: Prompt, completion: Completion) -> None:
        with self._lock:
            self._requests += 1
            self._prompt += len(prompt.token_ids)
            self._generated += len(completion.token_ids)
            if completion.prefilled_tokens is not None:
                self._prefilled += completion.prefilled_tokens
                self._reports_prefill = True

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, such as {"engine/requests": 12.0}, and set all counters to 0."""
        with self._lock:
            self._advance()
            elapsed = max(self._last - self._began, 1e-9)
            values = {
                "engine/requests": float(self._requests),
                "engine/generated_tokens": float(self._generated),
                "engine/prompt_tokens": float(self._prompt),
                "engine/utilization": min(1.0, self._busy / elapsed),
                "engine/running": self._request_seconds / self._busy if self._busy else 0.0,
            }
            if self._reports_prefill:
                values["engine/prefilled_tokens"] = float(self._prefilled)
            self._began = self._last
            self._reset()
            return values

    def _advance(self) -> None:
        # Add the time since the previous call to the counters of time. The caller must hold the lock.
        now = self._clock()
        if self._running:
            self._busy += now - self._last
            self._request_seconds += self._running * (now - self._last)
        self._last = now


@dataclass(frozen=True, slots=True)
class MeteredEngine:
    """An engine that counts the generations of ``engine`` with ``meter``."""

    engine: InferenceEngine
    meter: EngineMeter

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        with self.meter.request():
            completion = await self.engine.generate(prompt, params, session_id=session_id)
        self.meter.count(prompt, completion)
        return completion

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return await self.engine.update_weights(update)

    async def release(self, session_id: str) -> None:
        await self.engine.release(session_id)

    async def close(self) -> None:
        await self.engine.close()

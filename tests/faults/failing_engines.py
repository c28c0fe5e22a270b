"""Engines that fail, or whose thread ends, in the middle of whole runs (T11c, T11e)."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from fault_case import Case, Outcome
from hostile_runs import CONTINUED, RUN, case, control, policy_of, quiet, small_taskset, train

from agent_r1.core import threads as worker
from agent_r1.core.errors import EngineError, RunStopped
from agent_r1.core.inference import Completion, PolicyVersion, Prompt, SamplingParams, WeightUpdate
from agent_r1.core.messages import Message
from agent_r1.inference import torch_engine
from agent_r1.training import build as services


def dead_engine(seed: int, **settings: Any) -> Outcome:
    """From some generation on, the engine fails for all requests."""
    fired, asked = Counter[str](), itertools.count()

    class FailingEngine(torch_engine.TorchEngine):
        async def generate(
            self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None
        ) -> Completion:
            if (session_id or "").startswith(f"{RUN}:") and next(asked) > 60 + seed:
                fired["generations"] += 1
                raise EngineError("the server closed the connection")
            return await super().generate(prompt, params, session_id=session_id)

    record = train(small_taskset(), seed, (patch.object(services, "TorchEngine", FailingEngine),), steps=8, **settings)
    broken = list(record.violations_if(completed=False))
    if record.error is not None and not isinstance(record.error, RunStopped):
        broken.append(f"no diagnosis but {record.error}")
    return Outcome(fired["generations"], tuple(broken))


def dead_thread(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """The engine's thread ends from outside while it generates."""
    policy = policy_of(small_taskset())

    async def generate(engine: torch_engine.TorchEngine) -> list[Any]:
        prompt = Prompt(policy.renderer.render((Message.user("Where?"),), ()).token_ids)
        under_way = [asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=300))) for _ in range(8)]
        await asyncio.sleep(0.05)
        thread = next(t for t in threading.enumerate() if t.name == "engine" and t not in before)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        async with asyncio.timeout(3):
            return [*await asyncio.gather(*under_way, return_exceptions=True), *await _later(engine, prompt)]

    before = set(threading.enumerate())
    try:
        with ExitStack() as stack:
            for one in (quiet(), *patches):
                stack.enter_context(one)
            answers = asyncio.run(generate(torch_engine.TorchEngine(policy.model, 512)))
    except TimeoutError:
        return Outcome(1, ("no error after three seconds",))
    return Outcome(1, tuple(f"got {answer!r}" for answer in answers if not isinstance(answer, EngineError)))


async def _later(engine: torch_engine.TorchEngine, prompt: Prompt) -> list[Any]:
    """Return the results of requests after the end of the thread."""
    update = WeightUpdate(PolicyVersion(1, 1), "shared_memory", engine._runner.model)
    return await asyncio.gather(
        engine.generate(prompt, SamplingParams(max_tokens=3)), engine.update_weights(update), return_exceptions=True
    )


def _run_silently(jobs: Any, *_: Any) -> None:
    """Run jobs in a thread that ends without an error for its callers, like an executor's."""
    while (job := jobs.get()) is not None:
        worker._resolve([job()])


NEVER = {"monitor.failure_share": 1.0}
SILENT = patch.object(worker, "_run_jobs", _run_silently)

ENGINE_FAILURES: tuple[Case, ...] = (
    case(
        "T11c",
        "the engine fails for all requests from some generation on",
        "stopped with a diagnosis, weights those of the last step",
        dead_engine,
        500,
        1,
        control("no circuit breaker", CONTINUED, dead_engine, **NEVER),
    ),
    case(
        "T11e",
        "the engine's thread is ended",
        "current and later callers get an error within 3 s",
        dead_thread,
        20,
        1,
        control("the thread ends without an error", "no error after", dead_thread, patches=(SILENT,)),
    ),
)

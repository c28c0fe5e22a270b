"""Measure how many attempts a second the process of a run can make, record and route, with engines that answer at once.

    python benchmarks/driver.py                       # about two minutes on two cores
    python benchmarks/driver.py --attempts 4000 --concurrency 1024

An attempt has four turns: three calls of a tool and an answer. The engines are stand-ins without a model, so all time
is the driver's: the agent loop, rendering with a tokenizer, routing to the engine of a session, the tool and the run's
database. "function": an engine is a function of the process. "HTTP": it is the client of a vLLM server,
and the servers are another process, whose time does not count. The table has attempts per second of the driver's CPU
time and of wall time, and the CPU milliseconds of an attempt by part.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from agent_r1.core.environment import RolloutContext
from agent_r1.core.inference import (
    Canary,
    Capabilities,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.core.messages import Message
from agent_r1.core.profile import CPU_SECONDS, StepProfiler, profiling
from agent_r1.core.task import Task
from agent_r1.core.taskset import script, tool_call
from agent_r1.core.trajectory import AttemptId
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.inference.pool import EnginePool, Piece, PoolLimits, Replica
from agent_r1.inference.vllm import VllmEngine
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest, RolloutLimits
from agent_r1.rollout.scripted import ScriptedAgent
from agent_r1.store.folder import create_run
from agent_r1.training.config import EvalConfig
from agent_r1.training.policy import Policy, load_policy

GROUP = 8
LOGPROB = -0.7
TASK = Task("train/0", (Message.user("Who is the mayor of the town by the river?"),), {"gold": ["Alba"]}, "train")
Replies = Mapping[int, tuple[int, ...]]  # the number of tokens of a prompt -> the tokens of the answer


def search(query: str) -> str:
    """Search the encyclopedia.

    Args:
        query: the words to search for
    """
    return " ".join(["The town lies by a river, and its mayor is called Alba."] * 6)


ENV = ToolEnv([search], max_turns=4)


def canned_replies(policy: Policy) -> Replies:
    """Play the attempt once, and return its actions."""
    call = tool_call("search", query="the mayor of the town by the river")
    respond = script(call, call, call, Message.assistant("<answer>Alba</answer>"))
    context = RolloutContext(AttemptId("run", TASK.id, 0, 0), 0, float("inf"))
    (attempt,) = asyncio.run(ScriptedAgent(ENV, lambda _: respond, policy.renderer).run(TASK, context))
    return {len(attempt.prompt_ids(turn)): tuple(turn.action_ids) for turn in attempt.turns}


@dataclass(frozen=True)
class FunctionEngine:
    """A server that is a function of this process."""

    name: str
    replies: Replies

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({"safetensors"}))

    async def request(self, prompt: Prompt, params: SamplingParams) -> Piece:
        await asyncio.sleep(0)
        ids = self.replies[len(prompt.token_ids)]
        return Piece(ids, (LOGPROB,) * len(ids), (PolicyVersionSpan(0, 0),), "stop")

    async def stage(self, update: WeightUpdate) -> None: ...
    async def commit(self, version: PolicyVersion) -> None: ...
    async def verify(self, canary: Canary) -> None: ...
    async def check_health(self) -> None: ...
    async def probe(self) -> None: ...
    async def recover(self) -> None: ...
    async def release(self, session_id: str) -> None: ...
    async def close(self) -> None: ...


async def serve(replies: Replies) -> None:
    """Answer requests for tokens like a vLLM server, and print the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:  # the client has closed the connection
                break
            fields = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:-2])
            request = json.loads(await reader.readexactly(int(fields["content-length"])))
            ids = replies[len(request["token_ids"])]
            scored = [{"token_id": one, "logprob": LOGPROB} for one in ids]
            choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": scored}}
            versions = [{"version": "0", "start": 0, "end": len(ids)}]
            body = json.dumps({"choices": [choice | {"weight_versions": versions}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
            writer.write(body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass(frozen=True)
class Row:
    engines: str
    wall: float  # seconds
    cpu: Mapping[str, float]  # seconds by part
    attempts: int


async def measure(name: str, policy: Policy, replicas: Sequence[Replica], attempts: int, concurrency: int) -> Row:
    pool = EnginePool(replicas, PoolLimits(in_flight=max(1, concurrency // len(replicas))))
    agent = Agent(pool, policy.renderer, SamplingParams(1.0, max_tokens=64), policy.context_length)
    groups = [
        GroupRequest(number, replace(TASK, id=f"train/{number}"), GROUP) for number in range(max(1, attempts // GROUP))
    ]
    profiler = StepProfiler()
    with tempfile.TemporaryDirectory() as folder, closing(create_run(Path(folder) / "run", {})) as recorder:
        recorder.open_segment(0, {})
        limits = RolloutLimits(concurrency=concurrency)
        collector = Collector(AgentLoop(agent, ENV), (), recorder, recorder.run, limits)
        profiler.take()
        began, done = time.perf_counter(), 0
        with profiling(profiler):
            async for group in collector.collect(groups):
                assert all(len(one.turns) == 4 for one in group.trajectories), group.trajectories[0].reason
                done += len(group.trajectories)
        wall = time.perf_counter() - began
    await pool.close()
    times = profiler.take()
    cpu = {part.removeprefix(CPU_SECONDS): seconds for part, seconds in times.items() if part.startswith(CPU_SECONDS)}
    return Row(name, wall, cpu, done)


def print_rows(rows: Sequence[Row]) -> None:
    table = Table("engines", "attempts/s, CPU", "attempts/s, wall", "CPU ms of an attempt by part")
    for row in rows:
        parts = sorted(row.cpu.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{part} {1e3 * seconds / row.attempts:.2f}" for part, seconds in parts if seconds)
        total = sum(row.cpu.values())
        table.add_row(row.engines, f"{row.attempts / total:.0f}", f"{row.attempts / row.wall:.0f}", shown)
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=512, help="attempts at the same time")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve({int(length): tuple(ids) for length, ids in json.loads(options.serve).items()}))
        return
    policy = load_policy(EvalConfig(model="tiny-base"), None)
    replies = canned_replies(policy)
    gc.collect()
    gc.freeze()  # as a run does: else each collection would go through all objects of the libraries
    rows = []
    for count in (8, 64, 512):
        engines = [cast(Replica, FunctionEngine(f"engine {number}", replies)) for number in range(count)]
        rows.append(asyncio.run(measure(f"{count}, function", policy, engines, options.attempts, options.concurrency)))
    with ExitStack() as stack:
        command = [sys.executable, __file__, "--serve", json.dumps(replies)]
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8"))
        stack.callback(server.terminate)
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for count in (8, 64):
            clients = [VllmEngine(url, "policy", policy.context_length) for _ in range(count)]
            rows.append(asyncio.run(measure(f"{count}, HTTP", policy, clients, options.attempts, options.concurrency)))
    print_rows(rows)


if __name__ == "__main__":
    main()

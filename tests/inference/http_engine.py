"""A small inference server on loopback, and the client that makes it an InferenceEngine.

The server runs a TorchEngine in an event loop of its own, with a model that it loads from a folder. It shares no memory
with the trainer: the client writes new weights to a folder, which the server loads.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PreTrainedModel

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.core.threads import run_in_thread
from agent_r1.inference.policy_engine import WeightFolders
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model


class EngineServer(ThreadingHTTPServer):
    """Serves the model in ``folder`` until it is closed; ``url`` is its address. A context manager."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: str, context: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.engine, self.loop = TorchEngine(load_model(folder, torch.float32), context), asyncio.new_event_loop()
        for work in (self._run_loop, self.serve_forever):
            threading.Thread(target=work, daemon=True).start()

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/generate":
            params = SamplingParams(**body["params"] | {"stop_token_ids": tuple(body["params"]["stop_token_ids"])})
            return asdict(await self.engine.generate(Prompt(tuple(body["prompt"])), params, session_id=body["session"]))
        if path == "/update_weights":
            model = await asyncio.to_thread(load_model, body["folder"], torch.float32)
            update = WeightUpdate(PolicyVersion(**body["version"]), "shared_memory", model)
            return asdict(await self.engine.update_weights(update))
        return await self.engine.release(body["session"])

    def _run_loop(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        asyncio.run_coroutine_threadsafe(self.engine.close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: EngineServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            answer = asyncio.run_coroutine_threadsafe(self.server.answer(self.path, body), self.server.loop).result()
            status = 200
        except Exception as error:
            answer, status = {"error": str(error)}, 500
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class HttpEngine:
    """An InferenceEngine over the server at ``url``."""

    def __init__(self, url: str, max_context: int, folder: Path) -> None:
        self.capabilities = Capabilities(frozenset({"shared_memory"}), max_context, deterministic=True)
        self._folders = WeightFolders(folder, None, shared_memory=False)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        completion = await self._generate(prompt, params, session_id)
        condition, token_ids = params.stop_condition, completion.token_ids
        # A stop condition is a function and cannot be sent, so it is applied to the tokens that come back. The shorter
        # generation is then repeated: the KV cache of the session ends where it would if the engine had stopped there.
        ends = (end for end in range(1, len(token_ids) + 1) if condition and condition.is_met(token_ids[:end]))
        if (end := next(ends, None)) is None:
            return completion
        if end < len(token_ids):
            completion = await self._generate(prompt, replace(params, max_tokens=end), session_id)
        return replace(completion, finish_reason="stop")

    async def _generate(self, prompt: Prompt, params: SamplingParams, session_id: str | None) -> Completion:
        sent = asdict(replace(params, stop_condition=None))
        answer = await self._post("/generate", {"prompt": prompt.token_ids, "params": sent, "session": session_id})
        spans = tuple(PolicyVersionSpan(**span) for span in answer["version_spans"])
        return Completion(tuple(answer["token_ids"]), tuple(answer["logprobs"]), answer["finish_reason"], spans)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        if not isinstance(update.handle, PreTrainedModel):
            raise EngineError(f"this engine takes a model, got {update.transport!r}")
        folder = await run_in_thread(self._folders.write, update.handle, update.version.number)
        body = {"folder": str(folder), "version": asdict(update.version)}
        return PolicyVersion(**await self._post("/update_weights", body))

    async def release(self, session_id: str) -> None:
        await self._post("/release", {"session": session_id})

    async def close(self) -> None:
        await self._client.aclose()
        self._folders.close()

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = await self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"the inference server does not answer: {error!r}") from error
        if response.status_code != 200:
            raise EngineError(response.json()["error"])
        return response.json()

"""A small server on loopback with the endpoints of vLLM that the client uses, around a TorchEngine.

It can lie, abort, die and hang as real servers do: see ``Fault``.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import stat
import sys
import textwrap
import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Completion, PolicyVersion, Prompt, SamplingParams, StopCondition, WeightUpdate
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.inference.vllm_worker.agent_r1_weights import ReadWeights
from agent_r1.model.adapter import load_adapter
from agent_r1.model.load import load_model, load_tokenizer

LOADING = threading.Lock()
"""transformers cannot load two models at the same time in one process."""

OWN_MODEL = "policy"
"""The name of the server's own model; other names are adapters."""


class Fault(Enum):
    """What a server does wrong. Each of these was seen with real servers or can happen to one."""

    WRONG_LOGPROBS = auto()  # the log-probabilities are off by 0.5
    RAW_LOGPROBS = auto()  # log-probabilities at temperature 1, whatever the temperature
    NO_LOGPROBS = auto()  # the answer has no log-probabilities
    OLD_HEAD = auto()  # an update leaves the output head old
    OLD_WEIGHTS = auto()  # an update changes nothing, and reports success
    OLD_CACHE = auto()  # the prefix cache survives an update
    KEPT_CACHE = auto()  # the prefix cache is not reset, and the answer says so
    OLD_VERSION = auto()  # tokens carry the version before
    ABORT = auto()  # each request ends after three tokens, and every second one without any
    ALWAYS_ABORT = auto()  # no request gets a token
    DIE = auto()  # the next request kills the server
    DIE_IN_UPDATE = auto()  # the next update kills the server
    HANG = auto()  # requests for tokens get no answer, and the server is healthy
    FAIL_ONCE = auto()  # the next request answers 500
    NO_TOKENIZER = auto()  # stop strings are ignored
    OTHER_SHAPES = auto()  # an update fails: the server has another model
    NO_LORA = auto()  # it was started without the options for adapters
    OLD_ADAPTER = auto()  # a new adapter is loaded, and requests for it get the one before
    NO_ADAPTER = auto()  # an adapter is loaded, and requests for it get the server's own model
    OTHER_SCALE = auto()  # the product of an adapter's matrices is multiplied by half of alpha / rank
    TAKEN_NAME = auto()  # each adapter has a name that is loaded already, so it is refused
    LOST_ADAPTER = auto()  # a loaded adapter is not found
    NO_CHECKSUM = auto()  # it was started without the class that reports checksums of loaded weights
    HALF_OF_WEIGHTS = auto()  # an update reads half of the tensors


class FakeVllm(ThreadingHTTPServer):
    """Serves the model in ``folder`` until it is closed. A context manager."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, folder: str, context: int, faults: Iterable[Fault] = (), *, decode: Any = None,
        host: str = "127.0.0.1", port: int = 0,
    ) -> None:  # fmt: skip
        super().__init__((host, port), _Handler)
        self.url = f"http://{host}:{self.server_port}"
        self.faults, self.context, self.decode = set(faults), context, decode
        self.folder = folder
        self.model = load_model(folder, torch.float32)
        self.cached: dict[str, PreTrainedModel] = {}  # which model computed the prefix cache of a name
        self.adapters: dict[str, PreTrainedModel] = {}  # the server's own model with an adapter, by name
        self.engines: dict[str, TorchEngine] = {}  # of the adapters
        self.running: set[Future[Completion]] = set()
        self.version, self.staged = "default", False
        self.paths: list[str] = []  # of all requests
        self.seeds: list[int] = []
        self.num_requests = 0
        self.hung, self.resumed = threading.Event(), threading.Event()
        self.resumed.set()
        self.engine, self.loop = TorchEngine(load_model(folder, torch.float32), context), asyncio.new_event_loop()
        for work in (self._run_loop, lambda: self.serve_forever(poll_interval=0.01)):
            threading.Thread(target=work, daemon=True).start()

    def die(self) -> None:
        """Drop all connections, and accept no more."""
        self.faults.add(Fault.DIE)
        self.hung.set()
        self.resumed.set()
        threading.Thread(target=self.shutdown, daemon=True).start()
        self.socket.close()

    def _run_loop(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def __exit__(self, *_: object) -> None:
        self.hung.set()
        self.resumed.set()
        self.shutdown()
        for engine in (self.engine, *self.engines.values()):
            asyncio.run_coroutine_threadsafe(engine.close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.server_close()

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.paths.append(path)
        match path:
            case "/health":
                return 200, {}
            case "/v1/models":
                return 200, {"data": [{"id": OWN_MODEL, "max_model_len": self.context}]}
            case "/tokenize":
                return (400, {"error": "no tokenizer"}) if Fault.NO_TOKENIZER in self.faults else (200, {"tokens": [1]})
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/pause":
                self.resumed.clear()
                for request in set(self.running) if query["mode"] == ["abort"] else ():
                    request.cancel()
                return 200, {"status": "paused"}
            case "/resume":
                self.resumed.set()
                return 200, {"status": "resumed"}
            case "/collective_rpc":
                return self.call(body["method"], **body.get("kwargs", {}))
            case "/v1/load_lora_adapter" if Fault.NO_LORA not in self.faults:
                return self.load_adapter(body)
            case "/v1/unload_lora_adapter" if Fault.NO_LORA not in self.faults:
                found = self.adapters.pop(body["lora_name"], None)
                return (200, {}) if found else (404, {"error": {"message": "the adapter cannot be found"}})
            case "/update_weight_version":
                self.version = self.version if Fault.OLD_VERSION in self.faults else body["new_version"]
                return 200, {"success": True}
            case "/reset_prefix_cache":
                self.cached = self.cached if Fault.OLD_CACHE in self.faults else {}
                return 200, {"success": Fault.KEPT_CACHE not in self.faults}
            case "/inference/v1/generate":
                return self.generate(body)
        return 404, {"detail": "Not Found"}

    def call(self, method: str, folder: str = "", weights_path: str = "") -> tuple[int, dict[str, Any]]:
        if method == "reload_weights":
            return self.reload(weights_path)
        if Fault.NO_CHECKSUM in self.faults:
            return 500, {"error": {"message": f"'Worker' object has no attribute {method!r}"}}
        if method == "reports_checksums":
            return 200, {"results": [True]}
        read = ReadWeights(self.folder if Fault.OLD_WEIGHTS in self.faults else folder)
        tensors = dict(read)
        if Fault.HALF_OF_WEIGHTS in self.faults:
            read = ReadWeights(folder)
            for _ in zip(range(len(tensors) // 2), read, strict=False):
                pass
        status, answer = self.reload(folder)
        return (status, answer) if status != 200 else (200, {"results": [read.checksum]})

    def reload(self, folder: str) -> tuple[int, dict[str, Any]]:
        if Fault.DIE_IN_UPDATE in self.faults:
            self.die()
        if Fault.OTHER_SHAPES in self.faults or not Path(folder).is_dir():
            return 500, {"error": {"message": "Worker failed: shapes differ\nsee the log"}}
        if Fault.OLD_WEIGHTS in self.faults:
            return 200, {}
        with LOADING:
            new = load_model(folder, torch.float32)
        old = self.model
        if (
            Fault.OLD_HEAD in self.faults or new.config.tie_word_embeddings
        ):  # vLLM ignores a head that is not in the files
            new.config.tie_word_embeddings = False
            new.lm_head.weight = torch.nn.Parameter(old.lm_head.weight.detach().clone())
        number = int(Path(folder).name.rpartition("-")[2]) if "-" in Path(folder).name else 0
        update = WeightUpdate(PolicyVersion(number, number), "shared_memory", new)
        asyncio.run_coroutine_threadsafe(self.engine.update_weights(update), self.loop).result()
        self.model = new
        return 200, {}

    def load_adapter(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "lora_name" not in body:
            return 422, {"error": {"message": "lora_name: Field required"}}
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters or Fault.TAKEN_NAME in self.faults:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if not folder.is_dir():
            return 404, {"error": {"message": f"No adapter found for {folder}"}}
        with LOADING:
            model = copy.deepcopy(self.model)
            if Fault.NO_ADAPTER not in self.faults:
                load_adapter(model, folder)
        if Fault.OLD_ADAPTER in self.faults:
            model = [self.model, *self.adapters.values()][-1]
        for module in model.modules() if Fault.OTHER_SCALE in self.faults else ():
            if isinstance(module, LoraLayer):
                module.scaling["default"] /= 2
        self.adapters[name] = model
        self.engines[name] = TorchEngine(copy.deepcopy(model), self.context)
        return 200, {}

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "token_ids" not in body:
            return 400, {"error": {"message": "token_ids: Field required"}}
        name = body["model"]
        if name != OWN_MODEL and (name not in self.adapters or Fault.LOST_ADAPTER in self.faults):
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        given, ids = body["sampling_params"], tuple(body["token_ids"])
        if len(ids) + 1 > self.context:
            return 400, {"error": {"message": f"the prompt has {len(ids)} tokens"}}
        if Fault.FAIL_ONCE in self.faults:
            self.faults.discard(Fault.FAIL_ONCE)
            return 500, {"error": {"message": "internal error"}}
        if Fault.DIE in self.faults:
            self.die()
        if Fault.HANG in self.faults:
            self.hung.wait()
        self.resumed.wait()
        self.num_requests += 1
        self.seeds.append(given.get("seed", 0))
        if given.get("prompt_logprobs") is not None or (given.get("logprobs", 0) > 0 and given["max_tokens"] == 1):
            return 200, self.score(name, ids, given)
        params = SamplingParams(
            given.get("temperature", 1.0),
            max_tokens=given["max_tokens"],
            seed=given.get("seed", 0),
            stop_token_ids=tuple(given.get("stop_token_ids", ())),
            stop_condition=self.stop(given.get("stop", ())),
        )
        limit = self.limit(params.max_tokens)
        if limit == 0:
            return 200, self.completed(Completion((), (), "cancelled", ()), "abort")
        try:
            engine = self.engine if name == OWN_MODEL else self.engines[name]
            work = engine.generate(Prompt(ids), replace(params, max_tokens=limit))
            completion = self.wait(asyncio.run_coroutine_threadsafe(work, self.loop))
        except EngineError as error:
            return 400, {"error": {"message": str(error)}}
        except CancelledError:
            return 200, self.completed(Completion((), (), "cancelled", ()), "abort")
        aborted = completion.finish_reason == "length" and limit < params.max_tokens
        return 200, self.completed(completion, "abort" if aborted else completion.finish_reason, name)

    def wait(self, request: Future[Completion]) -> Completion:
        """Return the completion of a request, which a pause with the mode "abort" can cancel."""
        self.running.add(request)
        try:
            return request.result()
        finally:
            self.running.discard(request)

    def limit(self, max_tokens: int) -> int:
        """Return how many tokens the current request gets before a fault aborts it, at most ``max_tokens``."""
        if Fault.ALWAYS_ABORT in self.faults:
            return 0
        return min(max_tokens, 3 * (self.num_requests % 2)) if Fault.ABORT in self.faults else max_tokens

    def stop(self, strings: Iterable[str]) -> StopCondition | None:
        strings = tuple(strings)
        if not strings:
            return None
        return StopCondition(strings, lambda ids: any(string in self.decode(ids) for string in strings))

    def completed(self, completion: Completion, reason: str, name: str = OWN_MODEL) -> dict[str, Any]:
        """The answer for a completion. Its tokens carry their version; those of an adapter, the server's newest one."""
        is_newest = Fault.OLD_VERSION in self.faults or name != OWN_MODEL
        shift = 0.5 if Fault.WRONG_LOGPROBS in self.faults else 0.0
        scored = zip(completion.token_ids, completion.logprobs, strict=True)
        content: list[dict[str, Any]] = [{"token_id": token, "logprob": logprob - shift} for token, logprob in scored]
        for each in content:  # vLLM lists the sampled token first
            each["top_logprobs"] = [dict(each)]
        starts = [span.start for span in completion.version_spans]
        spans = [
            {
                "version": self.version if is_newest else str(span.version),
                "start": span.start,
                "end": end,
            }
            for span, end in zip(completion.version_spans, [*starts[1:], len(completion.token_ids)], strict=False)
        ]
        logprobs = None if Fault.NO_LOGPROBS in self.faults else {"content": content}
        choice = {"token_ids": completion.token_ids, "finish_reason": reason, "logprobs": logprobs}
        return {"choices": [{**choice, "weight_versions": spans}]}

    @torch.no_grad()
    def score(self, name: str, ids: tuple[int, ...], given: dict[str, Any]) -> dict[str, Any]:
        """The log-probabilities of the prompt, or of the most likely next tokens, as vLLM answers them."""
        shift = 0.5 if Fault.WRONG_LOGPROBS in self.faults else 0.0
        read, model = torch.tensor([ids]), self.adapters.get(name, self.model)
        if given.get("prompt_logprobs") is not None:  # computed without the prefix cache
            scores = model(read).logits[0, :-1].log_softmax(-1)
            found = [{str(token): {"logprob": scores[i, token].item() - shift}} for i, token in enumerate(ids[1:])]
            one = {"token_ids": [0], "finish_reason": "length"}
            return {"choices": [one], "prompt_logprobs": None if Fault.NO_LOGPROBS in self.faults else [None, *found]}
        temperature = 1.0 if Fault.RAW_LOGPROBS in self.faults else given["temperature"]
        cached = self.cached.setdefault(name, model)
        if Fault.OLD_CACHE in self.faults:
            cached = next(iter(self.cached.values()))
        scores = (cached(read).logits[0, -1] / temperature).log_softmax(-1)
        top = scores.topk(given["logprobs"] - 1)
        pairs = [(len(scores) - 1, scores[-1].item()), *zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        listed = [{"token_id": token, "logprob": logprob - shift} for token, logprob in pairs]
        content = [{**listed[0], "top_logprobs": listed}]
        return {"choices": [{"token_ids": [0], "finish_reason": "length", "logprobs": {"content": content}}]}


class _Handler(BaseHTTPRequestHandler):
    server: FakeVllm
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}"))

    def respond(self, body: dict[str, Any]) -> None:
        parts = urlsplit(self.path)
        status, answer = self.server.answer(parts.path, parse_qs(parts.query), body)
        if Fault.DIE in self.server.faults:
            self.close_connection = True
            self.connection.close()
            return
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):  # the client or the server has closed the connection
            self.close_connection = True

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def write_python(path: Path) -> Path:
    """Write an interpreter for the environment of vLLM, in which the module of the server is this one."""
    tests = Path(__file__).parents[1]
    path.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/sh
            [ "$1" = -c ] && exit 0
            export PYTHONPATH={tests}:{tests.parent}
            exec {sys.executable} -m inference.fake_vllm "$@"
            """
        ),
        "utf-8",
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def main() -> None:
    """Serve like ``python -m vllm.entrypoints.openai.api_server``, until the process is ended."""
    parser = argparse.ArgumentParser()
    for option in ("--model", "--host", "--port", "--max-model-len"):
        parser.add_argument(option, required=True)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(options.model)
    FakeVllm(
        options.model,
        int(options.max_model_len),
        decode=lambda ids: tokenizer.decode(list(ids)),
        host=options.host,
        port=int(options.port),
    )
    threading.Event().wait()


if __name__ == "__main__":
    main()

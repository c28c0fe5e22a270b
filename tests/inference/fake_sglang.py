"""A small server on loopback with the native API of SGLang that the client uses, around a TorchEngine.

Written from SGLang's documentation and sources. It has the faults of ``FakeVllm``, and the properties of SGLang that
the client has to respect: one version of the weights per answer, ``ignore_eos`` that also ignores stop tokens, end
tokens of the model's configuration, and greedy sampling (in place of ``generation_config.json``) if a parameter of the
distribution is not given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from inference.fake_vllm import FakeVllm, Fault

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Completion, Prompt, SamplingParams

DISTRIBUTION = {"top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}


class FakeSglang(FakeVllm):
    """Serves the model in ``folder`` until it is closed. A context manager.

    Args:
        eos: the end tokens of the model's configuration.
    """

    def __init__(
        self, folder: str, context: int, faults: Iterable[Fault] = (), *, eos: tuple[int, ...] = (), decode: Any = None
    ) -> None:
        self.num_running, self.eos, self.num_aborted = 0, eos, 0
        super().__init__(folder, context, faults, decode=decode)
        self.cached_by = self.model  # the model that computed the prefix cache

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.paths.append(path)
        match path:
            case "/health":
                return 200, {}
            case "/v1/models":
                return 200, {"data": [{"id": "policy", "max_model_len": self.context}]}
            case "/get_server_info":
                return 200, {"version": "0.5.23", "skip_tokenizer_init": Fault.NO_TOKENIZER in self.faults}
            case "/pause_generation":
                return self.pause(body)
            case "/continue_generation":
                self.resumed.set()
                return 200, {"status": "ok"}
            case "/update_weights_from_disk":
                return self.update(body)
            case "/generate":
                return self.generate(body)
        return 404, {"detail": "Not Found"}

    def pause(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Abort all requests, and answer when they have been answered."""
        assert body == {"mode": "abort"}, "the other modes give answers with tokens of two versions and one label"
        self.resumed.clear()
        while self.num_running:
            time.sleep(0.001)
        return 200, {"status": "ok"}

    def update(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "model_path" not in body:
            return 422, {"detail": "model_path: Field required"}
        assert not self.resumed.is_set(), "an update needs a paused server"
        status, answer = self.reload(body["model_path"])
        if status != 200:
            return 400, {"success": False, "message": answer["error"]["message"]}
        self.version = self.version if Fault.OLD_VERSION in self.faults else body["weight_version"]
        if Fault.KEPT_CACHE in self.faults:
            return 400, {"success": False, "message": "Cache flush failed after updating weights"}
        if Fault.OLD_CACHE not in self.faults and body["flush_cache"]:
            self.cached_by = self.model
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if len(body["input_ids"]) + 1 > self.context:
            return 400, {"error": {"message": f"The input ({len(body['input_ids'])} tokens) is too long"}}
        if Fault.FAIL_ONCE in self.faults:
            self.faults.discard(Fault.FAIL_ONCE)
            return 500, {"error": {"message": "internal error"}}
        if Fault.DIE in self.faults:
            self.die()
        if Fault.HANG in self.faults:
            self.hung.wait()
        while True:
            self.resumed.wait()
            self.num_running += 1
            if self.resumed.is_set():
                break
            self.num_running -= 1
        try:
            return self.sample(body)
        except EngineError as error:
            return 400, {"error": {"message": str(error)}}
        finally:
            self.num_running -= 1

    def sample(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.num_requests += 1
        given, ids = body["sampling_params"], tuple(body["input_ids"])
        self.seeds.append(given.get("sampling_seed", 0))
        assert body["return_logprob"] and given["no_stop_trim"]
        if body.get("logprob_start_len") == 0 or (body.get("top_logprobs_num") and given["max_new_tokens"] == 1):
            return 200, self.read_prompt(ids, body)
        stops = () if given.get("ignore_eos") else (*given.get("stop_token_ids", ()), *self.eos)
        params = SamplingParams(
            given.get("temperature", 1.0) if given.keys() >= DISTRIBUTION else 0.0,
            max_tokens=given["max_new_tokens"],
            seed=given.get("sampling_seed", 0),
            stop_token_ids=stops,
            stop_condition=self.stop(given.get("stop", ())),
            top_logprobs=body.get("top_logprobs_num", 0),
        )
        limit = self.limit(params.max_tokens)
        if limit == 0:
            return 200, self.answered(Completion((), (), "cancelled", ()), "abort")
        work = self.engine.generate(Prompt(ids), replace(params, max_tokens=limit))
        completion = asyncio.run_coroutine_threadsafe(work, self.loop).result()
        aborted = completion.finish_reason == "length" and limit < params.max_tokens
        if not self.resumed.is_set():  # a pause began: it aborts the request
            self.num_aborted += 1
            half = len(completion.token_ids) // 2
            cut = (completion.token_ids[:half], completion.logprobs[:half], completion.top_logprobs[:half])
            completion, aborted = Completion(*cut[:2], "length", (), cut[2]), True
        return 200, self.answered(completion, "abort" if aborted else completion.finish_reason)

    def answered(self, completion: Completion, reason: str) -> dict[str, Any]:
        shift = 0.5 if Fault.WRONG_LOGPROBS in self.faults else 0.0
        scored = zip(completion.logprobs, completion.token_ids, strict=True)
        meta: dict[str, Any] = {"finish_reason": {"type": reason}, "weight_version": self.version}
        meta["output_token_logprobs"] = [[logprob - shift, token, None] for logprob, token in scored]
        if completion.top_logprobs:
            tops = completion.top_logprobs
            meta["output_top_logprobs"] = [[[logprob, token, None] for token, logprob in top] for top in tops]
        if Fault.NO_LOGPROBS in self.faults:
            meta["output_token_logprobs"] = None
        return {"text": "", "output_ids": completion.token_ids, "meta_info": meta}

    @torch.no_grad()
    def read_prompt(self, ids: tuple[int, ...], body: dict[str, Any]) -> dict[str, Any]:
        """Return the log-probabilities of the prompt, or of the most likely next tokens, as SGLang answers them."""
        shift = 0.5 if Fault.WRONG_LOGPROBS in self.faults else 0.0
        read, given = torch.tensor([ids]), body["sampling_params"]
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "weight_version": self.version}
        if body.get("logprob_start_len") == 0:  # computed without the prefix cache
            scores = self.model(read).logits[0, :-1].log_softmax(-1)
            found = [[scores[place, token].item() - shift, token, None] for place, token in enumerate(ids[1:])]
            meta["input_token_logprobs"] = None if Fault.NO_LOGPROBS in self.faults else [[None, ids[0], None], *found]
            return {"output_ids": [0], "meta_info": meta}
        temperature = 1.0 if Fault.RAW_LOGPROBS in self.faults else given["temperature"]
        top = (self.cached_by(read).logits[0, -1] / temperature).log_softmax(-1).topk(body["top_logprobs_num"])
        pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        meta["output_top_logprobs"] = [[[logprob - shift, token, None] for logprob, token in pairs]]
        return {"output_ids": [0], "meta_info": meta}

"""A client with which an environment queries a model, for example as a simulated user or as a judge."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from agent_r1.core.environment import ModelClient
from agent_r1.core.inference import InferenceEngine, Prompt, SamplingParams
from agent_r1.core.messages import Message
from agent_r1.renderers.protocol import Renderer


def chat_client(engine: InferenceEngine, renderer: Renderer, params: SamplingParams) -> ModelClient:
    """Return a client that answers a conversation with a message sampled from ``engine``.

    ``renderer`` converts the conversation to tokens, and the sampled tokens to the message.

    The seed of a sample depends only on ``params.seed`` and on the text and the images of the conversation. So a
    repeated episode gets the same answers from the same weights. For a frozen model, use an engine whose weights are
    not updated. The client raises EngineError if the engine cannot answer.
    """

    async def complete(messages: tuple[Message, ...], /) -> Message:
        prompt = renderer.render(messages, ())
        images = "".join(one.image.sha256 for one in prompt.media)
        digest = hashlib.sha256(f"{params.seed}|{prompt.text}{images}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1  # 63 bits
        sampling = replace(params, stop_token_ids=renderer.stop_token_ids, seed=seed)
        completion = await engine.generate(Prompt(prompt.token_ids, prompt.media), sampling)
        return renderer.parse(completion.token_ids).message

    return complete

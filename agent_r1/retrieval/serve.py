"""Run the retrieval server."""

from __future__ import annotations

import signal
from collections.abc import Callable

from agent_r1.retrieval.config import RetrieverConfig, check
from agent_r1.retrieval.open import build_index
from agent_r1.retrieval.passages import read_corpus
from agent_r1.retrieval.protocol import Health
from agent_r1.retrieval.server import RetrievalServer


def serve(config: RetrieverConfig, on_started: Callable[[str, Health], None]) -> None:
    """Run the retrieval server until SIGTERM or SIGINT arrives, then answer the requests in progress.

    ``on_started(address, health)`` is called when the server listens. Raises InvalidInput if ``config`` cannot be used.
    """
    check(config)
    if config.encoder:
        import torch  # a BM25 server does not need torch

        torch.set_num_threads(config.threads)
    passages = read_corpus(config.corpus)
    health = Health(status="ok", passages=len(passages), search=config.encoder or "bm25")
    server = RetrievalServer(build_index(config, passages), health, config.host, config.port, config.allowed_hosts)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: server.stop())
    on_started(server.url, health)
    server.run()

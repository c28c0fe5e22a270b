"""Run the retrieval server until it is told to stop."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

from agent_r1.retrieval.config import RetrieverConfig, check
from agent_r1.retrieval.opening import index_of
from agent_r1.retrieval.passages import read_corpus
from agent_r1.retrieval.protocol import Health
from agent_r1.retrieval.server import RetrieverServer

_log = logging.getLogger(__name__)


def serve(config: RetrieverConfig, started: Callable[[str, Health], None]) -> None:
    """Serve, and return when SIGTERM or SIGINT comes and the requests under way are answered.

    ``started`` gets the server's address and what it says of itself, once it listens. Raises InvalidInput.
    """
    check(config)
    if config.encoder:
        import torch  # which a server of BM25 does not load

        torch.set_num_threads(config.threads)
    passages = read_corpus(config.corpus)
    health = Health(status="ok", passages=len(passages), search=config.encoder or "bm25")
    server = RetrieverServer((config.host, config.port), index_of(config, passages), health)

    def stop(signum: int, frame: object) -> None:
        # shutdown() waits for serve_forever, which this handler interrupts: only another thread may call it
        threading.Thread(target=server.shutdown, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with server:
        started(server.url, health)
        server.serve_forever(poll_interval=0.1)
        if not server.drain():
            _log.warning("stopped with requests unanswered")

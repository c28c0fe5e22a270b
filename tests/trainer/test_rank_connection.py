"""Ranks that another program started connect to the run over TCP, if they know its key."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest
from forked_ranks import ForkedProcess
from trainer import rank_requests

from agent_r1.trainer import ranks as rank_connection
from agent_r1.trainer.ranks import RankGroup, RankListener, StartedRank, connect_rank, serve_rank


@pytest.fixture
def listener() -> Iterator[RankListener]:
    with closing(RankListener("127.0.0.1")) as listening:
        yield listening


def connect_in_thread(address: tuple[str, int], key: str, rank: int) -> list[Connection]:
    """Connect, and return a list that gets the connection."""
    connected: list[Connection] = []
    threading.Thread(target=lambda: connected.append(connect_rank(address, key, rank)), daemon=True).start()
    return connected


def test_a_rank_with_the_key_is_accepted_and_gets_messages_of_any_size(listener: RankListener) -> None:
    rank = connect_in_thread(listener.address, listener.key, 3)
    accepted = listener.accept(60)
    assert accepted is not None and accepted[0] == 3
    message = os.urandom(5_000_000)
    threading.Thread(target=accepted[1].send_bytes, args=(message,), daemon=True).start()
    while not rank:
        time.sleep(0.01)
    assert rank[0].recv_bytes() == message
    rank[0].close()
    with pytest.raises(EOFError):
        accepted[1].recv_bytes()


def test_a_client_without_the_key_is_ignored(listener: RankListener) -> None:
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            connect_rank(listener.address, "another key", 0)
        except (AuthenticationError, OSError, EOFError) as error:
            failed.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    assert listener.accept(60) is None
    thread.join()
    assert failed


def test_a_silent_client_does_not_block_the_ranks(listener: RankListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_connection, "PROOF_SECONDS", 1)
    with socket.create_connection(listener.address):
        assert listener.accept(60) is None
    rank = connect_in_thread(listener.address, listener.key, 0)
    assert listener.accept(60) is not None
    assert rank is not None


def test_nobody_connects(listener: RankListener) -> None:
    assert listener.accept(0.01) is None


class ConnectingRanks:
    """Starts ranks that connect over TCP, as those in Ray actors do."""

    def start(self, ranks: int) -> list[StartedRank]:
        with closing(RankListener("127.0.0.1")) as listener:
            started = [ForkedProcess(serve_connected, listener.address, listener.key, rank) for rank in range(ranks)]
            accepted = [listener.accept(60) for _ in range(ranks)]
        pipes = dict(each for each in accepted if each is not None)
        return [StartedRank(pipes[rank], process, "127.0.0.1", 0) for rank, process in enumerate(started)]


def serve_connected(address: tuple[str, int], key: str, rank: int) -> None:
    serve_rank(connect_rank(address, key, rank))


def test_ranks_that_connect_compute_together() -> None:
    with closing(RankGroup[None](2, "cpu", ConnectingRanks())) as group:
        assert group.call(rank_requests.rank) == [0, 1]
        assert group.call(rank_requests.sum_of_ranks) == [1.0, 1.0]

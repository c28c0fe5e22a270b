"""Short runs on two stand-ins of vLLM servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from inference.fake_vllm import FakeVllm, Fault

from agent_r1.cli import main
from agent_r1.model.load import load_tokenizer
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify

CONTEXT = 512
OPTIONS = [
    *("--steps", "2", "--groups_per_step", "2", "--group_size", "4", "--evaluate_every", "0", "--evaluate_n", "2"),
    *("--max_tokens", "20", "--reward_weights.found", "1.0", "--checkpoint_every", "1", "--context", str(CONTEXT)),
    *("--splits", "style-a", "--pass_k", "0", "--quiet"),
]
Server = TypeVar("Server", bound=FakeVllm)


@contextmanager
def two_servers(kind: type[Server]) -> Iterator[list[Server]]:
    """Start two servers of tiny-base."""
    tokenizer = load_tokenizer("tiny-base")
    with ExitStack() as stack:
        yield [
            stack.enter_context(kind("tiny-base", CONTEXT, decode=lambda ids: tokenizer.decode(list(ids))))
            for _ in range(2)
        ]


def die_after_updates(server: FakeVllm, path: str, count: int) -> None:
    """Let a server die after its update number ``count``, counted by the requests to ``path``."""
    reload = server.reload

    def reload_and_die(folder: str) -> object:
        result = reload(folder)
        if server.paths.count(path) == count:
            server.faults.add(Fault.DIE)
        return result

    server.reload = reload_and_die  # type: ignore[method-assign, assignment]


def versions_of(folder: Path) -> Counter[int]:
    """Check the ledger of a run. Return how many turns were sampled from each version of the weights."""
    assert verify(folder).is_valid
    with closing(RunReader(folder)) as reader:
        turns = [turn for trajectory in reader.trajectories() for turn in trajectory.turns]
        gaps = [step.values["logprob_gap"] for step in reader.metrics() if "logprob_gap" in step.values]
        assert len(gaps) == 2 and max(gaps) < 1e-3
    return Counter(span.version for turn in turns for span in turn.version_spans)


def refuse(settings: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Start a run that has to be refused in one line before it begins, and return this line."""
    assert main(["train", *OPTIONS, *settings, "--run", str(folder / "run")]) == 2
    error = capsys.readouterr().err
    (line,) = (line for line in error.splitlines() if line.startswith("agent-r1: "))
    assert "Traceback" not in error
    assert not (folder / "run").exists()
    return line

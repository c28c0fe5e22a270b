"""`agent-r1 train` and `eval` on vLLM servers: the settings, the refusals, and whole runs on two servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inference.fake_vllm import FakeVllm, Fault, write_python
from training.server_runs import CONTEXT, OPTIONS, die_after_updates, refuse, two_servers, versions_of

from agent_r1.cli import main
from agent_r1.core.inference import PolicyVersion, WeightUpdate
from agent_r1.inference.pool import EnginePool
from agent_r1.inference.server_process import GUARD, ServerProcess

LORA = ["--trainer.lora.rank", "4", "--trainer.learning_rate", "0.01"]


@pytest.fixture
def servers() -> Iterator[list[FakeVllm]]:
    with two_servers(FakeVllm) as started:
        yield started


def vllm(servers: list[FakeVllm]) -> list[str]:
    return ["--engine.backend", "vllm", "--engine.vllm.urls", ",".join(server.url for server in servers)]


def test_a_run_completes_although_a_server_dies_in_the_middle(
    servers: list[FakeVllm], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    die_after_updates(servers[0], "/collective_rpc", 4)  # checksums?, the first check, version 0, version 1
    run = tmp_path / "run"
    assert main(["train", *OPTIONS, *vllm(servers), "--run", str(run)]) == 0
    assert set(versions_of(run)) == {0, 1}
    assert servers[0].paths.count("/inference/v1/generate") > 8
    assert "trained" in capsys.readouterr().out
    assert not list(Path("/dev/shm").glob(f"agent-r1-weights-{os.getpid()}-*"))


def test_a_run_on_one_server_repeats_bit_for_bit(
    servers: list[FakeVllm], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = []
    for name in ("first", "second"):
        run = tmp_path / name
        assert main(["train", *OPTIONS, *vllm(servers[:1]), "--run", str(run)]) == 0
        capsys.readouterr()
        assert main(["verify", str(run), "--digest"]) == 0
        digests.append(capsys.readouterr().out)
    assert digests[0] == digests[1]


def test_a_run_with_an_adapter_sends_the_adapter_alone(
    servers: list[FakeVllm], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load = servers[0].load_adapter

    def keep_old_one(body: dict[str, Any]) -> object:
        if body.get("lora_path", "").endswith("version-2"):
            servers[0].faults.add(Fault.OLD_ADAPTER)
        return load(body)

    servers[0].load_adapter = keep_old_one  # type: ignore[method-assign, assignment]
    run = tmp_path / "run"
    assert main(["train", *OPTIONS, *LORA, *vllm(servers), "--run", str(run)]) == 0
    assert set(versions_of(run)) == {0, 1}
    assert f"{servers[0].url} is left out: it does not serve the weights that it was sent" in caplog.text
    assert servers[1].paths.count("/v1/load_lora_adapter") > servers[1].paths.count("/collective_rpc")
    assert not servers[1].adapters


def test_servers_without_adapters_get_merged_weights_and_a_warning(
    servers: list[FakeVllm], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers[1].faults.add(Fault.NO_LORA)
    run = tmp_path / "run"
    assert main(["train", *OPTIONS, *LORA, *vllm(servers), "--run", str(run)]) == 0
    assert set(versions_of(run)) == {0, 1}
    wanted = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_NO_USAGE_STATS=1 --enable-lora --max-lora-rank 8"
    assert caplog.text.count(wanted) == 1
    assert servers[0].paths.count("/v1/load_lora_adapter") == 1  # the question whether it accepts adapters


def test_eval_compares_base_and_trained_model_on_the_same_servers(
    servers: list[FakeVllm], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--evaluate_n", "2", "--splits", "style-a", "--max_tokens", "20", "--context", str(CONTEXT), "--quiet"]
    assert main(["eval", "--model", "tiny-base", *options, "--pass_k", "0"]) == 0
    embedded = capsys.readouterr().out
    assert main(["eval", "--model", "tiny-base", *options, "--pass_k", "0", *vllm(servers)]) == 0
    assert capsys.readouterr().out == embedded


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.NO_TOKENIZER, "which has no tokenizer (no tokenizer); start it without --skip-tokenizer-init"),
        (Fault.OTHER_SHAPES, "answered 500: Worker failed: shapes differ; start it with this model, its vocabulary"),
        (Fault.RAW_LOGPROBS, "differ from the trainer's"),
        (Fault.DIE, "start vLLM 0.32 or newer there with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_in_one_line(
    servers: list[FakeVllm], fault: Fault, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].faults.add(fault)
    line = refuse(vllm(servers), tmp_path, capsys)
    assert servers[1].url in line and message in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--engine.backend vllm", "give engine.vllm.python to start servers, or engine.vllm.urls"),
        ("--engine.replicas 2", "several replicas need engine.backend vllm"),
        ("--engine.vllm.python /bin/python", "only with engine.backend vllm"),
        ("--engine.backend vllm --engine.vllm.urls 127.0.0.1:80", "is not an address"),
        ("--engine.backend vllm --engine.vllm.urls http://user:secret@a", "without user and password"),
        ("--engine.backend vllm --engine.vllm.python p --engine.vllm.urls http://a", "not both"),
        ("--engine.backend vllm --engine.vllm.urls http://127.0.0.1:9", "ConnectError"),
        (f"--engine.backend vllm --engine.vllm.python {sys.executable}", "which has no vllm"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    settings: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refuse(settings.split(), tmp_path, capsys)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return write_python(tmp_path / "python")


def test_a_run_starts_its_servers_keeps_the_output_of_a_crashed_one_and_ends_them(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, started, commands = tmp_path / "run", list[ServerProcess](), list[tuple[Any, ...]]()
    init, update = ServerProcess.__init__, EnginePool.update_weights

    def note(server: ServerProcess, *given: Any) -> None:
        init(server, *given)
        started.append(server)
        commands.append(given)

    async def kill_first(pool: EnginePool, weights: WeightUpdate) -> PolicyVersion:
        served = await update(pool, weights)
        if served.number == 1 and started[0].is_running:
            os.killpg(started[0].pid, signal.SIGKILL)
        return served

    monkeypatch.setattr(ServerProcess, "__init__", note)
    monkeypatch.setattr(EnginePool, "update_weights", kill_first)
    python.write_text(python.read_text("utf-8").replace("exec", "echo 'RuntimeError: no memory'\nexec", 1), "utf-8")
    options = ["--engine.backend", "vllm", "--engine.replicas", "2", "--engine.vllm.python", str(python)]
    assert main(["train", *OPTIONS, *LORA, *options, "--run", str(run)]) == 0
    for command, environment, _ in commands:
        assert "--enable-lora --max-lora-rank 8" in " ".join(command)
        assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert set(versions_of(run)) == {0, 1}
    kept = run / "logs" / "server-0.log"
    assert kept.read_text("utf-8").startswith("RuntimeError: no memory") and len(list(kept.parent.iterdir())) == 1
    assert f"a vLLM server ended: RuntimeError: no memory; its output is in {kept}" in caplog.text
    assert len(started) == 2 and not any(server.log.exists() for server in started)
    for server in started:
        with pytest.raises(ProcessLookupError):
            os.killpg(server.pid, 0)


def test_a_server_that_does_not_start_is_refused_with_its_last_error_while_another_one_still_starts(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for the log, which is kept
    fail = "*server-1.log) echo 'ValueError: no such head size'; echo bye; exit 1"
    python.write_text(
        f"#!/bin/sh\n[ $1 = -c ] && exit 0\ncase $(readlink /proc/$$/fd/1) in {fail};; esac\nsleep 600\n", "utf-8"
    )
    options = ["--engine.backend", "vllm", "--engine.replicas", "2", "--engine.vllm.python", str(python)]
    options += ["--engine.vllm.start_seconds", "60"]
    assert main(["train", *OPTIONS, *options, "--run", str(tmp_path / "run")]) == 2
    assert "a server that ended: ValueError: no such head size; read /" in capsys.readouterr().err
    logs = sorted(file.name for file in tmp_path.glob("agent-r1-vllm-*/*"))
    assert logs == ["server-0.log", "server-1.log"]  # no lock: they are kept


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are listed from /proc")
@pytest.mark.parametrize("end", ["kill", "stop", "guard"])
def test_no_process_of_a_server_is_left(end: str, tmp_path: Path) -> None:
    mark = f"{time.time_ns()}"
    child = f"trap '' TERM; {'' if end == 'guard' else f'sleep 60{mark} &'} exec sleep 60{mark}"
    program = f"""
import pathlib, time
from agent_r1.inference.server_process import GUARD, ServerProcess
import agent_r1.inference.server_process as module
module.STOP_SECONDS = 0.1
server = ServerProcess(["/bin/sh", "-c", {child!r}], {{}}, pathlib.Path({str(tmp_path / "log")!r}))
print("started", flush=True)
if {end!r} == "stop":
    server.stop()
time.sleep(60)
"""
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert driver.stdout is not None and driver.stdout.readline() == b"started\n"
    if end in ("kill", "guard"):
        while not processes(f"sleep\x0060{mark}"):
            time.sleep(0.01)
        os.kill(driver.pid if end == "kill" else processes(GUARD.name, mark)[0], signal.SIGKILL)
    deadline = time.monotonic() + 60
    try:
        while processes(f"sleep\x0060{mark}"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        driver.kill()
        driver.wait()


def processes(*marks: str) -> list[int]:
    """Return the ids of the processes of this machine whose command contains all ``marks``. One mark must be unique."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode("utf-8", "replace")
            if all(mark in command for mark in marks):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_output_of_a_server_goes_to_its_log(tmp_path: Path) -> None:
    server = ServerProcess(["/bin/sh", "-c", "echo $MARK $PYTHONPATH"], {"MARK": "here"}, tmp_path / "log")
    while server.is_running:
        time.sleep(0.01)
    server.stop()
    assert server.last_words() == "here"

"""``agent-r1 show``: options of the list of attempts, and the titles of the times of a profiled run."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest
from recorded_runs import record_all
from shown_runs import CONFIG, write_run

from agent_r1.cli import main
from agent_r1.core.events import LogEvent, PolicyPublished, StepMetrics, StepTimings
from agent_r1.core.inference import PolicyVersion
from agent_r1.store.folder import create_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("options") / "demo"
    write_run(folder, LogEvent("completed", "3 steps in 1.0 s"))
    return str(folder)


@pytest.mark.parametrize(
    "options",
    [["--step", "2"], ["--sort", "reward", "--limit", "3"], ["--status", "engine_failed"], ["--text", "GONE"]],
)
def test_the_options_of_a_list_need_no_further_option(
    run: str, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    found = []
    for more in ([], ["--attempts"]):
        assert main(["show", run, *options, *more, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["attempts"])
    assert found[0] == found[1] != []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["20.1", "--limit", "3"], "--limit: got it and the attempt 20.1; leave one out"),
        (["worst", "--step", "2", "--sort", "reward"], "--sort: got it and the attempt worst; leave one out"),
        (["--metric", "reward", "--step", "2"], "--step: got it and the metric reward; leave one out"),
    ],
)
def test_an_option_without_effect_is_refused(
    run: str, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main(["show", run, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and line in output.err and output.err.count("\n") == 1


def test_the_phases_and_the_profile_of_a_step_have_different_titles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"rollout_seconds": 3.0, "profile/forward": 0.25, "profile/tools": 0.5, "profile_cpu/forward": 0.2}
    with closing(create_run(tmp_path / "run", CONFIG)) as writer:
        record_all(writer, [PolicyPublished(PolicyVersion(0, 0, "begin"))])
        asyncio.run(writer.record(StepMetrics(1, {"reward": 0.5}), StepTimings(1, times)))
    assert main(["show", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert out.count("Time of a step") == 1 and out.count("Profile of an average step") == 1

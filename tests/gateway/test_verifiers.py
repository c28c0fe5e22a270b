"""The example for verifiers: its harness acts through the gateway, and its rewards reach the trajectory."""

import runpy
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from agent_r1.core.trajectory import Status

pytestmark = pytest.mark.skipif(
    find_spec("verifiers") is None or shutil.which("uv") is None,
    reason="verifiers or uv is not installed (docs/environments.md); its harness also needs a package index",
)

TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in str(trace.assistant_messages[-1].content))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(12):
            data = SumData(prompt=f"What is {n} + 2?", system_prompt="Give a number.", answer=n + 2)
            yield SumTask(data, self.config.task)


__all__ = ["Sums"]
"""


def test_a_task_set_of_verifiers_is_played_and_scored(episodes, tmp_path, monkeypatch):
    (tmp_path / "sums_v1.py").write_text(TASKSET, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERIFIERS_TASKSET", "sums-v1")
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "verifiers_agent.py"))
    assert [task.split for task in names["tasks"]].count("test") == 2
    task = names["tasks"][1]
    for text, reward in (("It is 3.", 1.0), ("It is 9.", 0.0)):
        trajectory = episodes.play(lambda url, key, _: names["run"](url, key, task), lambda prompt, text=text: text)
        assert trajectory.status is Status.COMPLETED, trajectory.reason
        assert names["reward"](trajectory, task) == reward
        assert [message.text for message in trajectory.start] == ["Give a number.", "What is 1 + 2?"]
        for turn, (prompt, _, completion) in zip(trajectory.turns, episodes.engine.generations, strict=True):
            assert (trajectory.prompt_ids(turn), turn.action_ids) == (prompt.token_ids, completion.token_ids)

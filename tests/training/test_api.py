"""The Python interface: train and Trainer, in a script and in a notebook."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import agent_r1
from agent_r1 import Message, Task, ToolEnv, Trainer, exact_match
from agent_r1.core.errors import Interrupted, InvalidInput
from agent_r1.training.progress import SilentProgress, StepReport

ENV = ToolEnv(tools=[], rewards=[exact_match])
TASKS = [Task(str(n), (Message.user("Say x."),), {"answers": ("x",)}) for n in range(2)]
HELD_OUT = [Task("held-out", (Message.user("Say x, please."),), {"answers": ("x",)})]
SMALL: Mapping[str, Any] = {
    "steps": 1,
    "groups_per_step": 1,
    "group_size": 2,
    "pass_k": 0,
    "monitor": {"patience": 9},
    "max_tokens": 2,
    "evaluate_n": 1,
    "progress": SilentProgress(),
}


def test_a_trainer_trains_evaluates_and_saves_a_model_that_transformers_loads(tmp_path: Path) -> None:
    steps: list[StepReport] = []
    trainer = Trainer(ENV, TASKS, eval_tasks=HELD_OUT, run=str(tmp_path / "run"), callbacks=[steps.append], **SMALL)
    assert set(trainer.evaluate().cells) == {"base-tool-call"}
    with pytest.raises(InvalidInput, match="call train"):
        trainer.save_model(tmp_path / "model")
    trainer.train()
    assert [report.step for report in steps] == [1] and "reward" in steps[0].metrics
    assert set(trainer.evaluate().cells) == {"base-tool-call", "trained"}
    folder = trainer.save_model(tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    with pytest.raises(InvalidInput, match="name a new folder"):
        trainer.save_model(folder)


def test_validation_tasks_choose_the_best_checkpoint_and_are_not_in_the_table(tmp_path: Path) -> None:
    tasks = [*TASKS, Task("v", (Message.user("Say x now."),), {"answers": ("x",)}, split="validation")]
    steps: list[StepReport] = []
    report = agent_r1.train(
        ENV, tasks, eval_tasks=HELD_OUT, run=str(tmp_path / "run"), evaluate_every=1, callbacks=[steps.append], **SMALL
    )
    assert set(report.table.cells["trained"]) == {"test"}
    assert "validation_em" in steps[0].metrics


def interrupt_waiting_thread() -> None:
    """Raise KeyboardInterrupt in the main thread, as Ctrl-C in a notebook does."""
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_in_a_notebook_stops_the_run_and_saves_its_last_step(tmp_path: Path) -> None:
    settings = {**SMALL, "steps": 50, "run": str(tmp_path / "run"), "checkpoint_every": 50}

    async def notebook() -> object:
        return agent_r1.train(ENV, TASKS, callbacks=[lambda report: interrupt_waiting_thread()], **settings)

    with pytest.raises(Interrupted):
        asyncio.run(notebook())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eval_tasks": [{"id": "x"}]}, r"eval_tasks\[0\]: got an object of type dict"),
        ({"tasks": None, "eval_tasks": HELD_OUT}, "tasks: got an object of type NoneType"),
        ({"rewards": exact_match}, "rewards: .* give a list of functions"),
        ({"callbacks": ["x"]}, "callbacks: .* give a list of functions"),
        ({"data": "questions.jsonl"}, "data: .* leave it out"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Trainer(ENV, **{"tasks": TASKS, **arguments})

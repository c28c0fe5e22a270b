"""The Python interface: ``agent_r1.train(env, tasks, model=..)`` and ``agent_r1.Trainer``."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from agent_r1.config import Layer, resolve
from agent_r1.core.environment import Env
from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord
from agent_r1.core.task import AgentFunction, Task
from agent_r1.rewards.scoring import RewardFunction
from agent_r1.store.folder import run_folder
from agent_r1.store.reader import RunReader, read_file
from agent_r1.store.saved_weights import find_folder
from agent_r1.tasksets import build, is_available
from agent_r1.tasksets.tinywiki.model import TINY_BASE
from agent_r1.tasksets.transcripts import (
    make_taskset as transcript_tasks,
    open_transcripts,
    parse_record,
    read_transcripts,
)
from agent_r1.training.build import Placement
from agent_r1.training.config import LIMITS, EvalConfig, TrainConfig, resolve_config
from agent_r1.training.evaluate import evaluate
from agent_r1.training.mixture import load_mixture
from agent_r1.training.progress import Progress, StepReport, make_progress
from agent_r1.training.resume import resolve_resume_config
from agent_r1.training.run import resume as resume_run, train as start_run
from agent_r1.training.sft import EPOCHS, sft_layers
from agent_r1.training.shutdown import request_shutdown
from agent_r1.training.tables import Table, TrainReport
from agent_r1.training.user_task import check_agent, check_tasks, load_task_file, make_taskset

Result = TypeVar("Result")
Callback = Callable[[StepReport], object]


@contextmanager
def _in_python_words() -> Iterator[None]:
    # Most errors are written for the command line. A command as a whole stays as it is.
    try:
        yield
    except InvalidInput as error:
        if "agent-r1 " in error.do or not _OPTION.search(f"{error.what} {error.do}"):
            raise
        what, do = (_OPTION.sub(_as_argument, text) for text in (str(error.what), error.do))
        raise InvalidInput(what, got=error.got, do=do) from error.__cause__


_OPTION = re.compile(r"--([a-z]\w*(?:\.[a-z]\w*)*)( [A-Z]+\b)?")


def _as_argument(option: re.Match[str]) -> str:
    name, *inner = option[1].split(".")
    value = "True" if name == "resume" else ".." if option[2] is None or inner else f'"{option[2].strip()}"'
    for key in reversed(inner):
        value = f'{{"{key}": {value}}}'
    return f"{name}={value}"


@_in_python_words()
def resume(
    run: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
    placement: Placement | None = None,
    **settings: Any,
) -> TrainReport:
    """Continue a stopped run of a task set or of a Python file, such as one of the command line.

    A run of ``env`` and ``tasks`` in Python continues with ``agent_r1.train(env, tasks, run=.., resume=True)``.

    Args:
        run: the name of a run in runs/, or its folder.
        callbacks, progress, placement: as for :class:`Trainer`.
        settings: new values of the settings in :data:`agent_r1.training.resume.CHANGEABLE`.
    """
    layer = Layer("agent_r1.resume", {"run": str(run), **settings})
    shown = _CallbackProgress(progress or _notebook_progress(), callbacks)

    def work() -> TrainReport:
        config = resolve_resume_config([layer])
        with closing(RunReader(run_folder(config.run))) as reader:
            file = read_file(reader)
        if file is not None:
            taskset = load_task_file(file, config.model)
        elif not config.acts:
            taskset = open_transcripts(run_folder(config.run))
        elif config.taskset.endswith(".toml"):
            taskset = load_mixture(Path(config.taskset), config.seed, config.model)
        elif is_available(config.taskset):
            sources = (config.data, config.corpus, config.seed, config.sandbox, config.encoder)
            taskset = build(config.taskset, *sources)
        else:
            do = f"give them: agent_r1.train(env, tasks, run={config.run!r}, resume=True)"
            raise InvalidInput("run", got=f"{config.run}, whose env and tasks a Python program made", do=do)
        return resume_run(config, taskset, shown, placement)

    return _run_outside_event_loop(work)


def _notebook_progress() -> Progress:
    # Rich would make each line an output of its own in a notebook. As text on stderr, the lines are one output.
    return make_progress(Console(stderr=True, force_jupyter=False))


def train(
    env: Env | Mapping[str, Env], tasks: Sequence[Task], *, resume: bool = False, **arguments: Any
) -> TrainReport:
    """Train an agent in ``env`` on ``tasks``, and return a report that compares the agent with the baselines.

    Short for ``Trainer(env, tasks, **arguments).train(resume)``; the arguments are those of :class:`Trainer`.
    """
    return Trainer(env, tasks, **arguments).train(resume)


@_in_python_words()
def finetune(
    transcripts: str | Path | Sequence[Mapping[str, Any]],
    *,
    model: str,
    epochs: float = EPOCHS,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> TrainReport:
    """Fine-tune a model on the assistant's messages of transcripts, in a new run. :func:`resume` continues a run.

    Args:
        transcripts: a JSON or JSONL file, hf:NAME, or a list of rows ``{"messages": [..], "tools": [..], "split": ..}``
            in the OpenAI format. Rows of the split "validation" choose the best step.
        model: a Hugging Face name, a folder, or RUN or RUN@STEP for the weights of a run.
        epochs: passes over the transcripts, unless ``steps`` is given.
        callbacks, progress: as for :class:`Trainer`.
        settings: fields of :class:`~agent_r1.training.config.TrainConfig`.
    """
    if isinstance(transcripts, str | Path):
        given = read_transcripts(Path(transcripts))
    else:
        rows = (JsonRecord(Path("transcripts"), number, row) for number, row in enumerate(transcripts, start=1))
        given = list(map(parse_record, rows))
    taskset = transcript_tasks(given)
    layers = sft_layers([Layer("agent_r1.finetune", {"model": model, **settings})], taskset, epochs)
    shown = _CallbackProgress(progress or _notebook_progress(), callbacks)
    return _run_outside_event_loop(lambda: start_run(resolve_config(TrainConfig, layers, taskset), taskset, shown))


class Trainer:
    """A trainer for your own agent, in scripts and notebooks.

    Args:
        env: a :class:`~agent_r1.ToolEnv`, or any object with ``tools`` and ``open()``; or several by name, of which
            each task names its own: ``Task(.., env="calc")``.
        tasks: the tasks. Training uses the tasks of the split "train", which is the default split of a task. If
            ``evaluate_every`` is set, the split "validation" determines the best step. The result table has one column
            for each split, except "train" and "validation".
        eval_tasks: tasks for the evaluation only. If the split of such a task is "train", the split becomes "test".
        model: a Hugging Face name, a folder, or RUN or RUN@STEP for the weights of a run; default: tiny-base.
        algorithm: a name such as "grpo", "FILE.py:NAME", or an Algorithm.
        rewards: reward functions, in addition to the rewards of the environment.
        agent: an agent program (``docs/gateway.md``): a function of base URL, API key and task, or "FILE.py:NAME".
        callbacks: functions that take the :class:`StepReport` of each step. An exception stops the run.
        progress: the display of the progress, on stderr by default.
        placement: functions that make the inference engine and the object that updates the weights. By default, the
            settings determine these functions.
        settings: fields of :class:`~agent_r1.training.config.TrainConfig`, for example ``steps=20,
            trainer={"learning_rate": 1e-5}``.
    """

    @_in_python_words()
    def __init__(
        self,
        env: Env | Mapping[str, Env],
        tasks: Sequence[Task],
        *,
        eval_tasks: Sequence[Task] = (),
        model: str | None = None,
        algorithm: object | None = None,
        rewards: Sequence[RewardFunction] = (),
        agent: AgentFunction | str | None = None,
        callbacks: Sequence[Callback] = (),
        progress: Progress | None = None,
        placement: Placement | None = None,
        **settings: Any,
    ) -> None:
        _check_arguments(settings, rewards, callbacks)
        every_task: Sequence[Task] = tasks
        if eval_tasks:
            check_tasks("tasks", tasks)
            check_tasks("eval_tasks", eval_tasks)
            held_out = [replace(task, split="test") if task.split == "train" else task for task in eval_tasks]
            every_task = [*tasks, *held_out]
        taskset = make_taskset(env, every_task, "custom", model or TINY_BASE, rewards)
        self._taskset = replace(taskset, agent=None if isinstance(agent, str) else check_agent("agent", agent))
        named = (("model", model), ("algorithm", algorithm), ("agent", agent if isinstance(agent, str) else None))
        given = {key: value for key, value in named if value is not None}
        self._layers = [Layer("agent_r1.train", {**given, **settings})]
        self._progress = _CallbackProgress(progress or _notebook_progress(), callbacks)
        self._placement = placement
        self._run: Path | None = None
        self._config: TrainConfig | None = None

    @_in_python_words()
    def train(self, resume: bool = False) -> TrainReport:
        """Train the agent, and return a report that compares the agent with the baselines.

        If ``resume`` is true, continue an earlier run with its stored settings. The setting ``run`` gives the name or
        the folder of this run. Only the settings in :data:`agent_r1.training.resume.CHANGEABLE` can be changed.

        Raises:
            InvalidInput: an argument cannot be used. Nothing was written.
            RunStopped: the monitor stopped the run. The message is a diagnosis.
            Interrupted: a signal stopped the run. The last step was saved, unless ``checkpoint_every`` is 0.
        """

        def work() -> TrainReport:
            if resume:
                self._config = resolve_resume_config(self._layers)
                return resume_run(self._config, self._taskset, self._progress, self._placement)
            self._config = resolve_config(TrainConfig, self._layers, self._taskset)
            return start_run(self._config, self._taskset, self._progress, self._placement)

        report = _run_outside_event_loop(work)
        self._run = report.run
        return report

    @_in_python_words()
    def evaluate(self, **settings: Any) -> Table:
        """Return a result table of the baselines, the base model and (after training) the trained agent.

        ``settings`` are fields of :class:`~agent_r1.training.config.EvalConfig`. With ``api_url`` and ``api_model``,
        models behind an API are rows too, and the only ones if the trainer has no model and has not trained.
        """
        config = self._config or resolve_config(TrainConfig, self._layers, self._taskset)
        given = resolve(EvalConfig, [Layer("Trainer.evaluate", settings), *self._layers], TrainConfig)
        shared = {name: value for name, value in dict(config).items() if name in EvalConfig.model_fields}
        shared |= {"evaluate_n": config.evaluate_n or 200, "methods": ()}
        model = (given if given.api_model else config).model if self._run is None else str(self._run)
        own = settings.keys() | (LIMITS if not settings.get("model", model) else ())  # not those of tiny-base
        shared |= {name: value for name, value in dict(given).items() if name in own}
        chosen = EvalConfig.model_construct(**{**shared, "model": settings.get("model", model)})
        return _run_outside_event_loop(lambda: evaluate(chosen, self._taskset, self._progress, self._placement))

    def save_model(self, folder: str | Path) -> Path:
        """Copy the trained model (Hugging Face format) to ``folder``, and return the path.

        Raises InvalidInput if the trainer has not trained yet, or if ``folder`` exists.
        """
        if self._run is None:
            raise InvalidInput("save_model", got="a trainer that has not trained", do="call train() first")
        target = Path(folder)
        if target.exists():
            raise InvalidInput("folder", got=f"{target}, which exists", do="name a new folder")
        shutil.copytree(find_folder(str(self._run)), target)
        return target


def _check_arguments(settings: Mapping[str, Any], rewards: object, callbacks: object) -> None:
    if "resume" in settings:
        do = "give it to train(), or call agent_r1.resume(run) for a run of the command line"
        raise InvalidInput("resume", got="an argument of Trainer", do=do)
    for name in ("taskset", "data", "corpus", "sandbox"):
        if name in settings:
            raise InvalidInput(name, got=repr(settings[name]), do="leave it out: env and tasks are the task set")
    for name, functions in (("rewards", rewards), ("callbacks", callbacks)):
        if not isinstance(functions, Sequence) or not all(map(callable, functions)):
            raise InvalidInput(name, got=repr(functions), do="give a list of functions")


class _CallbackProgress:
    def __init__(self, progress: Progress, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._progress = progress
        self.print_line, self.start, self.finish = progress.print_line, progress.start, progress.finish
        self.on_attempts = progress.on_attempts

    def on_step(self, report: StepReport) -> None:
        self._progress.on_step(report)
        for callback in self._callbacks:
            callback(report)


def _run_outside_event_loop(work: Callable[[], Result]) -> Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    results: list[Result] = []
    errors: list[BaseException] = []

    done = threading.Event()  # an interrupted Thread.join() would report the thread as ended

    def run_and_keep() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run_and_keep, name="agent_r1", daemon=True).start()
    while not done.is_set():
        try:
            done.wait()
        except KeyboardInterrupt:
            if not request_shutdown(signal.SIGINT):
                raise  # no run is in progress, so no step has to be saved first
    if errors:
        raise errors[0]
    return results[0]

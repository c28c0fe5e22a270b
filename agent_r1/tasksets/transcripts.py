"""Transcripts: conversations that others have written, from which a model learns by imitation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord, atomic_write
from agent_r1.core.messages import Action, Message, ToolSpec, from_openai, to_openai
from agent_r1.core.task import Task
from agent_r1.core.taskset import Responder, TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.rewards.scoring import FunctionScorer
from agent_r1.tasksets import TRANSCRIPTS
from agent_r1.tasksets.files import nonempty_splits, read_rows

EXAMPLE = "example"
"""The reward of each transcript, 1: the algorithm sft imitates what has a positive return."""

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation, of which a model learns to write the messages of the assistant."""

    # the prompt before the first answer that is learned; it can have solved examples, whose answers are not learned
    opening: tuple[Message, ...]
    # each answer that is learned, and the messages after it
    turns: tuple[tuple[Message, tuple[Message, ...]], ...]
    tools: tuple[ToolSpec, ...] = ()  # the tools that the prompt describes
    split: str = TRAIN  # "train", or "validation"

    def to_openai(self) -> dict[str, Any]:
        """Return the transcript as a row of a JSONL file. :func:`parse` reads it."""
        tools = {"tools": [tool.to_openai() for tool in self.tools]} if self.tools else {}
        opening = [to_openai(one) | ({"weight": 0} if one.role == "assistant" else {}) for one in self.opening]
        rest = [to_openai(message) for answer, observation in self.turns for message in (answer, *observation)]
        return {"messages": [*opening, *rest], **tools, "split": self.split}


def parse(row: Mapping[str, Any]) -> Transcript:
    """Return the transcript in a row ``{"messages": [..], "tools": [..], "split": ".."}`` in the OpenAI format.

    Tools can also be JSON text, as in many data sets. Answers with ``"weight": 0`` that come before all others are a
    part of the prompt. Raise ValueError if the row is no transcript.
    """
    messages, tools, split = row.get("messages"), row.get("tools") or [], row.get("split") or TRAIN
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError("no list of messages under 'messages'")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise ValueError(f"tools that are no JSON: {tools!r:.60}") from None
    if not isinstance(tools, list):
        raise ValueError(f"tools that are no list: {tools!r:.60}")
    if split not in (TRAIN, VALIDATION):
        raise ValueError(f"the split {split!r}, which is neither {TRAIN!r} nor {VALIDATION!r}")
    read, specs = tuple(map(_message, messages)), tuple(map(parse_tool, tools))
    roles = [message.role for message in read]
    weights = [message.get("weight", 1) for message in messages]
    learned = [place for place, role in enumerate(roles) if role == "assistant" and weights[place] != 0]
    if not learned:
        raise ValueError("no message of the assistant, from which a model could learn")
    if roles[0] == "assistant":
        raise ValueError("a message of the assistant at its beginning, before any prompt")
    for place, role in enumerate(roles):
        if role == "assistant" and weights[place] != (place >= learned[0]):
            raise ValueError(f"message {place} has the weight {weights[place]}: give 0 only before all that is learned")
        if place and roles[place - 1 : place + 1] == ["assistant", "assistant"]:
            raise ValueError(f"two messages of the assistant in a row, of which message {place} is the second")
    ends = (*learned[1:], len(read))
    turns = tuple((read[place], read[place + 1 : end]) for place, end in zip(learned, ends, strict=True))
    return Transcript(read[: learned[0]], turns, specs, split)


def _message(row: Mapping[str, Any]) -> Message:
    # Calls are written by the format of the model that learns, and not in the words of another one.
    message = from_openai({**row, "role": "system"} if row.get("role") == "developer" else row)
    calls = (call if call.arguments is None else replace(call, raw="") for call in message.calls)
    return replace(message, calls=tuple(calls))


def parse_tool(tool: Any) -> ToolSpec:
    """Return the tool that an OpenAI-style dictionary describes. Raise ValueError if it describes none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool without a name: {tool!r:.80}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    description = function.get("description") or ""
    if not isinstance(parameters, Mapping) or not isinstance(description, str):
        raise ValueError(f"the tool {function['name']!r} without a text as description and a schema as parameters")
    return ToolSpec(function["name"], description, parameters)


def read_transcripts(data: Path) -> list[Transcript]:
    """Return the transcripts of a JSON or JSONL file, or of a data set on the hub."""
    return [parse_record(record) for record in read_rows(data)]


def parse_record(record: JsonRecord) -> Transcript:
    """Return the transcript in a row. Raise InvalidInput if the row is no transcript."""
    try:
        return parse(record.values)
    except ValueError as error:
        do = 'give rows {"messages": [..], "tools": [..]} in the OpenAI format'
        raise record.error(str(error), do) from error


@dataclass(slots=True)
class Transcripts:
    """The environments of transcripts, in which a script writes the answers (see ``responder``)."""

    by_task: Mapping[str, Transcript]
    tools: tuple[ToolSpec, ...] = ()

    def for_task(self, task: Task) -> _TranscriptEnv:
        return _TranscriptEnv(self.by_task[task.id])

    async def open(self, task: Task, context: RolloutContext) -> _Episode:
        return await self.for_task(task).open(task, context)

    def responder(self, task_id: str) -> Responder:
        """Return the script that writes the answers of a transcript."""
        turns = self.by_task[task_id].turns
        return lambda conversation, turn: turns[turn][0]


class _TranscriptEnv:
    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self.tools = transcript.tools

    async def open(self, task: Task, context: RolloutContext) -> _Episode:
        return _Episode(self._transcript, self._transcript.opening)


@dataclass(slots=True)
class _Episode:
    transcript: Transcript
    start: tuple[Message, ...]
    turn: int = 0

    async def step(self, action: Action) -> Transition:
        answer, observation = self.transcript.turns[self.turn]
        # The ids of calls are those of the parsed action, as in any other episode.
        pairs = zip(answer.calls, action.message.calls, strict=False)
        ids: dict[str | None, str] = {before.id: after.id for before, after in pairs}
        messages = tuple(replace(one, call_id=ids.get(one.call_id, one.call_id)) for one in observation)
        self.turn += 1
        return Transition(messages, end="terminal" if self.turn == len(self.transcript.turns) else None)

    async def close(self) -> None:
        return None


def make_taskset(transcripts: Sequence[Transcript]) -> TaskSet:
    """Return the task set of ``transcripts``, with the splits "train" and "validation"."""
    names = [f"transcript/{number}" for number in range(1, len(transcripts) + 1)]
    by_task = dict(zip(names, transcripts, strict=True))
    splits: dict[str, list[Task]] = {TRAIN: [], VALIDATION: []}
    for name, transcript in by_task.items():
        # the data are the whole transcript, so that the hash of the tasks covers it
        splits[transcript.split].append(Task(name, transcript.opening, transcript.to_openai(), transcript.split))
    if not splits[TRAIN]:
        do = f"leave the split out, or give {TRAIN!r}, in the rows to learn from"
        raise InvalidInput("transcripts", got=f"none to learn from, and {len(transcripts)} for validation", do=do)
    return TaskSet(
        name=TRANSCRIPTS,
        env=Transcripts(by_task),
        tasks=nonempty_splits(splits, Path(TRANSCRIPTS)),
        scorers=(FunctionScorer({EXAMPLE: _one}),),
        recipe={"algorithm": "sft", "group_size": 1, "trainer.learning_rate": 2e-5},
        evaluation=(),
        validation=VALIDATION if splits[VALIDATION] else None,
        rewards=(EXAMPLE,),
    )


FILE = "transcripts.jsonl"
"""The file in the folder of a run with the transcripts that it imitates."""


def keep_transcripts(taskset: TaskSet, run: Path) -> None:
    """Write the transcripts of a new run to its folder. A run with attempts has none."""
    if isinstance(taskset.env, Transcripts):
        rows = (json.dumps(one.to_openai(), ensure_ascii=False) for one in taskset.env.by_task.values())
        atomic_write(run / FILE, "".join(f"{row}\n" for row in rows).encode())


def open_transcripts(run: Path) -> TaskSet:
    """Return the task set of the transcripts that a run imitates."""
    return make_taskset(read_transcripts(run / FILE))


def _one(trajectory: Trajectory, task: Task) -> float:
    return 1.0


def transcripts_of(trajectory: Trajectory, tools: Sequence[ToolSpec], split: str = TRAIN) -> Iterator[Transcript]:
    """Yield the conversations of an attempt as transcripts. ``tools`` are those of the run."""
    for branch in trajectory.branches:
        own, (first, *others) = tuple(tools) if branch.tools is None else branch.tools, branch.turns
        answers = [turn.action.message for turn in branch.turns]
        observations = [*(turn.new_messages for turn in others), branch.turns[-1].observation]
        transcript = Transcript(first.new_messages, tuple(zip(answers, observations, strict=True)), own, split)
        yield parse(transcript.to_openai())  # as it is read from the run's file

"""Small runs for tests of the viewer, written by the run writer: an ordinary one, and one full of hostile texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from hostile_texts import HOSTILE, IN_ATTRIBUTES, IN_HTML
from recorded_runs import record_all

from agent_r1.core.events import (
    AttemptFate,
    AttemptFinished,
    AttemptStarted,
    Event,
    LogEvent,
    PolicyPublished,
    StepMetrics,
    StepTimings,
    TokenRecord,
    TokensRecorded,
)
from agent_r1.core.inference import PolicyVersion, PolicyVersionSpan
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolResult
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn, TurnTiming
from agent_r1.store.folder import create_run
from agent_r1.store.reader import result_event

GROUP_SIZE = 4
HOSTILE_RUN = "<img src=x onerror=document.title=1>"


def make_turn(index: int, parent: int | None, query: str, found: str, ok: bool = True) -> Turn:
    call = ToolCall(f"call_{index}", "search", {"query": query, "k": 3}, "{}")
    return Turn(
        index=index,
        parent=parent,
        new_ids=(5, 6, 7),
        action_ids=(9, 2, 4),
        logprobs=(-0.1, -2.5, -0.4),
        version_spans=(PolicyVersionSpan(0, 0),),
        finish_reason="stop",
        action=Action(Message.assistant("", (call,), reasoning="I have to look it up."), f"<search>{query}</search>"),
        observation=(Message.tool(found, f"call_{index}"),),
        results=(ToolResult((Text(found),), ok, None if ok else "tool_failed", None, 0.25),),
        rewards={"format": -0.5},
        call_rewards=({"found": float(ok)},),
        call_ends=(2,),
        timing=TurnTiming(start_seconds=0.0, end_seconds=0.8, env_seconds=2.5),
    )


def make_trajectory(run: str, step: int, index: int) -> Trajectory:
    """Return attempt ``index`` of the group of ``step``: 0 answers, 1 fails at its tool, 2 rewrites its context, 3 has
    no environment."""
    group = step - 1
    attempt = AttemptId(run, f"style-a/{group}", group, index)
    first = make_turn(0, None, f"Who rules Alba{step}?", "Alba: ruler Bruno.", ok=index != 1)
    second = make_turn(1, None if index == 2 else 0, "Where was Bruno born?", "Bruno: born in Coris.")
    if index == 2:
        second = replace(second, new_messages=(Message.system("What you found: Bruno."), Message.user("Go on.")))
    return Trajectory(
        attempt=attempt,
        task_id=attempt.task,
        turns=(first,) if index == 3 else (first, second),
        status=Status.ENVIRONMENT_FAILED if index == 3 else Status.OUT_OF_TURNS if index == 1 else Status.COMPLETED,
        rewards={} if index == 3 else {"exact_match": float(index == 0), "steps": (0.5, 0.25)},
        reason="ConnectionError: no route to the wiki" if index == 3 else None,
        start=(Message.system("Answer with a name."), Message.user(f"Where was the ruler of Alba{step} born?")),
        seconds=1.5 + index,
    )


def make_records(trajectory: Trajectory) -> tuple[TokenRecord, ...]:
    """Return token records: the engine's second token has a gap, and the last token no weight."""
    index = trajectory.attempt.sample_index
    advantages = (1.5, 1.5, 0.75) if index == 0 else (-0.5, -0.5, -0.25)
    return tuple(
        TokenRecord(trajectory.attempt, turn.index, (-0.1, -2.25, -0.4), advantages, (0.01, 0.01, 0.0), (0.3, 0.9, 0.1))
        for turn in trajectory.turns
    )


def step_events(run: str, step: int) -> Iterator[Event]:
    """Yield the events of one step: four attempts, of which the last is dropped."""
    trajectories = [make_trajectory(run, step, index) for index in range(GROUP_SIZE)]
    for trajectory in trajectories:
        yield AttemptStarted(trajectory.attempt, "train", 0)
        yield AttemptFinished(trajectory)
    for trajectory in trajectories[:3]:
        yield AttemptFate(trajectory.attempt, "trained", step, credit=step + trajectory.attempt.sample_index / 10)
    yield AttemptFate(trajectories[3].attempt, "dropped", step, "the environment failed")
    yield TokensRecorded(tuple(record for one in trajectories[:2] for record in make_records(one)))
    yield PolicyPublished(PolicyVersion(step, step, str(step)))
    values = {"reward": step / 10, "reward/exact_match": step / 8, "reward/steps": 0.75, "entropy": 2.0 / step}
    values |= {"completed": 2.0, "out_of_turns": 1.0, "environment_failed": 1.0, "tokens": 21.0, "calls": 7.0}
    values |= {"invalid_calls": 0.0, "failed_calls": 1.0, "staleness": 0.0, "logprob_gap": 0.25, "policy_loss": 0.1}
    validation = {"validation_em": min(step, 4) / 8} if step % 2 == 0 else {}
    yield StepMetrics(step, values | validation)
    yield StepTimings(step, {"rollout_seconds": 3.0, "update_seconds": 2.0, "tokens_per_second": 100.0 + step})


def write_run(folder: Path, steps: int, learning_rate: float = 1e-6, complete: bool = True) -> None:
    """Write a run of ``steps`` steps; at its end, one attempt is still running."""
    trainer = {"learning_rate": learning_rate}
    algorithm = {"name": "grpo", "loss": {"clip_high": 0.28}, "kl": None}
    config = {"steps": steps, "taskset": "tinywiki", "model": "tiny-base", "trainer": trainer, "algorithm": algorithm}
    with closing(create_run(folder, config | {"reward_weights": {"steps": 0.0}})) as writer:
        record_all(writer, [PolicyPublished(PolicyVersion(0, 0, "0"))])
        record_all(writer, *(list(step_events(folder.name, step)) for step in range(1, steps + 1)))
        record_all(writer, [LogEvent("warning", "gradient_spike: the gradient norm is far above the recent median")])
        if complete:
            cell = {"em": 0.5, "f1": 0.6, "n": 200, "low": 0.43, "high": 0.57}
            validation = {"step": 6, "split": "validation", "measure": "exact match", **cell}
            table = {"naive-rag": {"style-a": cell}, "trained": {"style-a": cell, "style-b": {**cell, "em": 0.9}}}
            results = [
                result_event("validation", validation),
                result_event("table", {"measure": "exact match", "table": table}),
            ]
            record_all(writer, [*results, LogEvent("completed", f"{steps} steps in 12.0 s")])
        else:
            record_all(writer, [AttemptStarted(AttemptId(folder.name, "style-a/99", 99, 0), "train", steps)])


def write_hostile_run(parent: Path) -> None:
    """Write a run in which every text field has a hostile text: each attempt has another one."""
    folder = parent / HOSTILE_RUN
    settings = {text: text for text in HOSTILE[:20]} | {"model": IN_HTML[0], "taskset": IN_ATTRIBUTES[0]}
    with closing(create_run(folder, {"steps": 1, "algorithm": {"name": IN_HTML[10]}, **settings})) as writer:
        record_all(writer, [PolicyPublished(PolicyVersion(0, 0, "0"))])
        for index, text in enumerate(HOSTILE):
            trajectory = make_hostile(folder.name, index, text)
            end = AttemptFate(trajectory.attempt, "dropped", 1, text)
            record_all(writer, [AttemptStarted(trajectory.attempt, text, 0), AttemptFinished(trajectory), end])
        metrics = {f"reward/{text}": 0.5 for text in HOSTILE} | {f"metric {text}": 1.0 for text in HOSTILE}
        record_all(writer, [StepMetrics(1, {"reward": 0.5, **metrics}), *(LogEvent(text, text) for text in HOSTILE)])
        results = [LogEvent(kind, text) for kind in ("validation", "table", "tools") for text in HOSTILE]
        record_all(writer, results)
        record_all(writer, [StepMetrics(2, {name: value + 1 for name, value in metrics.items()})])


def make_hostile(run: str, index: int, text: str) -> Trajectory:
    calls = (
        ToolCall("call_0", text, {text: text, "nested": [text, {text: text}]}, text),
        ToolCall("call_1", "search", None, text, error=text),
    )
    results = (ToolResult((Text(text),), False, text), ToolResult((Text(text),), True))
    turn = Turn(
        index=0,
        parent=None,
        new_ids=(5,),
        action_ids=(9,),
        logprobs=(-0.1,),
        version_spans=(PolicyVersionSpan(0, 0),),
        finish_reason="stop",
        action=Action(Message.assistant(text, calls, reasoning=text), text),
        observation=(Message.tool(text, "call_0"), Message.tool(text, "call_1"), Message.user(text)),
        results=results,
        rewards={text: 1.0},
        call_rewards=({text: -1.0}, {}),
        call_ends=(0, 0),
        new_messages=(Message.user(text), Message.assistant(text, calls)),
    )
    return Trajectory(
        attempt=AttemptId(run, text, index // GROUP_SIZE, index % GROUP_SIZE),
        task_id=text,
        turns=(turn,),
        status=Status.COMPLETED,
        rewards={text: 1.0},
        reason=text,
        answer=text,
        start=(Message.system(text), Message.user(text)),
        seconds=0.1,
    )

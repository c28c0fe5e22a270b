"""Conversations of one attempt, which are the only code that makes turns, and sessions.

A session is a conversation with a policy whose tokens are known. It converts messages to tokens, samples actions, and
stores the exact tokens, log-probabilities and policy versions of each turn. Its caller handles only messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.inference import Completion, InferenceEngine, Prompt, PromptMedia, SamplingParams
from agent_r1.core.messages import Action, Message, ToolResult, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn, TurnKind, TurnTiming
from agent_r1.renderers.protocol import RenderedPrompt, Renderer
from agent_r1.renderers.text_decoding import with_stop_strings
from agent_r1.rollout.user_code import isolate
from agent_r1.tools.execution import run_detached

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The result of a session if it has no action to return: the status of the attempt, and the reason."""

    status: Status
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SessionPrompt:
    """The messages, text and tokens of a prompt, which continues an earlier turn (the parent) or starts a branch."""

    messages: Messages
    tools: tuple[ToolSpec, ...]  # the tools that the prompt describes
    rendered: RenderedPrompt  # the text of the whole conversation, but only the tokens after the parent turn's action
    token_ids: tuple[int, ...]  # of the whole conversation
    parent: int | None  # the index of the parent turn; None for a new branch
    new_messages: Messages  # the messages after the action of the parent turn; all messages in a new branch
    media: tuple[PromptMedia, ...] = ()  # all images, with the positions of their placeholders in token_ids


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled action whose outcome is not known yet, with its prompt, tokens and timing."""

    prompt: SessionPrompt
    completion: Completion
    action: Action
    call_ends: tuple[int, ...]
    kind: TurnKind
    timing: TurnTiming


log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""The time limit for releasing a session, and for closing an episode, in seconds."""


class Rollout(Protocol):
    """Code that makes attempts at tasks: the agent loop, a game, a scripted agent, or a user's own code."""

    async def run(self, task: Task, context: RolloutContext) -> Sequence[Trajectory]:
        """Make one attempt at the task, and return its trajectory in a sequence of length 1."""
        ...


class Conversation(ABC):
    """The conversation of one attempt with what acts in it. Subclasses sample the actions."""

    def __init__(self, attempt: AttemptId) -> None:
        self._attempt = attempt
        self._started = time.perf_counter()
        self._turns: list[Turn] = []
        self._pending: Sample | None = None  # a sample whose outcome is not known yet
        self._accepted = 0.0  # when the sample in _pending was accepted

    @property
    def turns(self) -> Sequence[Turn]:
        return self._turns

    @abstractmethod
    def prompt(self, messages: Messages, tools: tuple[ToolSpec, ...] = ()) -> SessionPrompt:
        """Return the prompt for a conversation, which can continue an earlier turn."""

    @abstractmethod
    def new_branch(self, messages: Messages, tools: tuple[ToolSpec, ...] = ()) -> SessionPrompt:
        """Return the prompt of a conversation that continues no earlier turn."""

    def fits(self, prompt: SessionPrompt) -> bool:
        """Return whether the context has room for the prompt and a whole action, if its length is known."""
        return True

    @abstractmethod
    async def generate(self, prompt: SessionPrompt, kind: TurnKind = "act") -> Sample | Stopped:
        """Sample an action for the prompt without recording it. Return the sample, or Stopped if there is no action."""

    def spoken_text(self, action: Action, tools: tuple[ToolSpec, ...]) -> str:
        """Return the text of an action without its reasoning and its calls."""
        return action.message.text

    @abstractmethod
    async def close(self) -> None:
        """Release what the conversation holds. Raise nothing."""

    async def sample(self, prompt: SessionPrompt, kind: TurnKind = "act") -> Action | Stopped:
        """Sample an action for the prompt. Return the action, or Stopped if there is no action."""
        self._complete_pending()
        sample = await self.generate(prompt, kind)
        return sample if isinstance(sample, Stopped) else self.accept(sample)

    def accept(self, sample: Sample) -> Action:
        """Record a sampled action and return it. A later call of :meth:`observe` adds the outcome of the action."""
        self._complete_pending()
        self._pending, self._accepted = sample, self._seconds()
        return sample.action

    def observe(self, outcome: Transition, tools: tuple[ToolSpec, ...] | None = None) -> Turn:
        """Complete the turn of the last sampled action, and return it. ``tools`` are those that are not the run's."""
        sample = self._pending
        if sample is None:
            raise RuntimeError("no action is waiting for its outcome")
        turn = Turn(
            index=len(self._turns),
            parent=sample.prompt.parent,
            new_ids=sample.prompt.rendered.token_ids,
            action_ids=sample.completion.token_ids,
            logprobs=sample.completion.logprobs,
            version_spans=sample.completion.version_spans,
            finish_reason=sample.completion.finish_reason,
            action=sample.action,
            observation=outcome.messages,
            results=outcome.results,
            rewards=outcome.rewards,
            kind=sample.kind,
            call_rewards=outcome.call_rewards,
            call_ends=sample.call_ends,
            new_messages=sample.prompt.new_messages,
            tools=tools,
            media=sample.prompt.rendered.media,
            timing=replace(sample.timing, env_seconds=self._seconds() - self._accepted),
        )
        self._turns.append(turn)
        self._pending = None
        return turn

    def trajectory(
        self, task_id: str, status: Status, *, reason: str | None = None, start: Messages = ()
    ) -> Trajectory:
        """Return the completed turns as a trajectory. An action whose outcome was not observed is left out."""
        return Trajectory(
            attempt=self._attempt,
            task_id=task_id,
            turns=tuple(self._turns),
            status=status,
            truncated=status in (Status.OUT_OF_TURNS, Status.OUT_OF_TOKENS),
            reason=reason,
            start=start,
            seconds=self._seconds(),
        )

    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def _complete_pending(self) -> None:
        if self._pending is not None:
            self.observe(Transition(()))


class Session(Conversation):
    """The conversation of one attempt with the policy: it receives messages, returns actions and records turns."""

    def __init__(
        self,
        engine: InferenceEngine,
        renderer: Renderer,
        params: SamplingParams,
        context_length: int,
        attempt: AttemptId,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(attempt)
        self._engine, self._renderer, self._params = engine, renderer, params
        self._context_length, self._seed = context_length, seed
        self._known: list[_KnownConversation] = []  # one for each turn, and one for the sample in _pending
        self._longest = (0, 0)  # the length of the longest known conversation
        self._newest: SessionPrompt | None = None  # the prompt of the newest known conversation
        self._num_generations = 0  # started so far; each generation has a seed of its own

    async def respond(self, messages: Messages, tools: tuple[ToolSpec, ...] = ()) -> Action | Stopped:
        """Return the policy's next action in a conversation, or Stopped. Only a cancelled call raises an exception."""
        try:
            with isolate(_RenderError):
                prompt = self.prompt(messages, tools)
        except _RenderError as error:
            return Stopped(Status.ENVIRONMENT_FAILED, str(error))
        return await self.sample(prompt)

    def prompt(self, messages: Messages, tools: tuple[ToolSpec, ...] = ()) -> SessionPrompt:
        """Return the prompt for a conversation. The prompt continues an earlier turn or starts a new branch.

        An earlier turn can be continued if ``messages`` begin with the conversation of the turn, including the action.
        Of several such turns, the turn with the longest conversation is continued, and the prompt contains the exact
        tokens of this turn. If no turn can be continued, or if the chat template changes earlier text, the prompt
        starts a new branch.

        Raise UnsupportedChat if the conversation cannot be rendered.
        """
        self._complete_pending()
        longest, parent = (0, 0), None
        for index in reversed(range(len(self._known))):  # usually the last turn matches, and ends the search
            known = self._known[index]
            if known.length > longest and known.begins(messages):
                longest, parent = known.length, index
                if longest == self._longest:
                    break
        if parent is None:
            return self.new_branch(messages, tools)
        size = len(self._known[parent].messages)
        action = replace(self._known[parent].action, message=messages[size - 1])
        rendered, before, images = self._state_after(parent)
        bridge = self._renderer.bridge_to_next_turn(
            rendered, messages[: size - 1], action, self._turns[parent].action_ids, messages[size:], tools
        )
        if bridge is None:
            return self.new_branch(messages, tools)
        media = (*images, *(one.moved(len(before)) for one in bridge.media))
        return SessionPrompt(messages, tools, bridge, before + bridge.token_ids, parent, messages[size:], media)

    def new_branch(self, messages: Messages, tools: tuple[ToolSpec, ...] = ()) -> SessionPrompt:
        rendered = self._renderer.render(messages, tools)
        return SessionPrompt(messages, tools, rendered, rendered.token_ids, None, messages, rendered.media)

    def fits(self, prompt: SessionPrompt) -> bool:
        return len(prompt.token_ids) + self._params.max_tokens <= self._context_length

    async def generate(
        self,
        prompt: SessionPrompt,
        kind: TurnKind = "act",
        *,
        max_tokens: int | None = None,
        stop_strings: tuple[str, ...] = (),
    ) -> Sample | Stopped:
        """Sample an action for the prompt without recording it. Return the sample, or Stopped if there is no action.

        :meth:`accept` records a sample. Several calls can run at the same time. Each call has its own seed.
        """
        room = self._context_length - len(prompt.token_ids)
        if room <= 0:
            return Stopped(Status.OUT_OF_TOKENS)
        number, limit, renderer = self._num_generations, self._params.max_tokens, self._renderer
        self._num_generations += 1
        try:
            with isolate(_RenderError):
                stop = renderer.stop_condition(prompt.tools)
                params = replace(
                    self._params,
                    max_tokens=min(limit if max_tokens is None else min(limit, max_tokens), room),
                    stop_token_ids=renderer.stop_token_ids,
                    stop_condition=with_stop_strings(stop, stop_strings, renderer.decode) if stop_strings else stop,
                    seed=self._attempt.seed(self._seed, number),
                )
            start = self._seconds()
            with isolate(_EngineFailure):
                completion = await self._engine.generate(
                    Prompt(prompt.token_ids, prompt.media), params, session_id=str(self._attempt)
                )
            first = completion.first_token_seconds
            timing = TurnTiming(start, self._seconds(), None if first is None else start + first)
            if completion.finish_reason == "cancelled":
                return Stopped(Status.CANCELLED, "the engine cancelled the generation")
            with isolate(_RenderError):
                return self._parse(prompt, completion, number, kind, timing)
        except _EngineFailure as error:
            return Stopped(Status.ENGINE_FAILED, str(error))
        except _RenderError as error:
            return Stopped(Status.ENVIRONMENT_FAILED, str(error))

    def accept(self, sample: Sample) -> Action:
        action = super().accept(sample)
        has_end = not set(sample.completion.token_ids[-1:]).isdisjoint(self._renderer.stop_token_ids)
        messages = (*sample.prompt.messages, sample.action.message)
        known = _KnownConversation(messages, sample.action, sample.prompt.tools, has_end)
        self._longest = max(self._longest, known.length)
        self._known.append(known)
        self._newest = sample.prompt
        return action

    def add_observation(self, prompt: SessionPrompt) -> None:
        """Store ``prompt.new_messages`` as the observation of the turn that ``prompt`` continues."""
        if prompt.parent is not None and not self._turns[prompt.parent].observation:
            observation = prompt.messages[len(self._known[prompt.parent].messages) :]
            results = tuple(ToolResult(message.parts, ok=True) for message in observation if message.role == "tool")
            turn = replace(self._turns[prompt.parent], observation=observation, results=results)
            self._turns[prompt.parent] = turn

    def spoken_text(self, action: Action, tools: tuple[ToolSpec, ...]) -> str:
        return self._renderer.spoken_text(action, tools)

    async def close(self) -> None:
        """Tell the engine to release the session. If this fails, log a warning and raise nothing."""
        await close_quietly(f"releasing the session of {self._attempt}", self._engine.release(str(self._attempt)))

    def _parse(
        self, prompt: SessionPrompt, completion: Completion, turn: int, kind: TurnKind, timing: TurnTiming
    ) -> Sample:
        renderer, tools = self._renderer, prompt.tools
        length = renderer.action_length(completion.token_ids, tools)
        if length < len(completion.token_ids):
            completion = replace(
                completion,
                token_ids=completion.token_ids[:length],
                logprobs=completion.logprobs[:length],
                finish_reason="stop",
                version_spans=tuple(span for span in completion.version_spans if span.start < length),
            )
        action = renderer.parse(completion.token_ids, turn, tools)
        call_ends = renderer.call_ends(completion.token_ids, tools) if action.message.calls else ()
        return Sample(prompt, completion, action, call_ends, kind, timing)

    def _state_after(self, index: int) -> tuple[RenderedPrompt, tuple[int, ...], tuple[PromptMedia, ...]]:
        action_ids = self._turns[index].action_ids
        if index == len(self._known) - 1 and self._newest is not None:
            return self._newest.rendered, self._newest.token_ids + action_ids, self._newest.media
        rendered = self._renderer.render(self._known[index].messages[:-1], self._known[index].tools)
        path: list[Turn] = []
        current: int | None = index
        while current is not None:
            path.append(self._turns[current])
            current = path[-1].parent
        tokens: list[int] = []
        media: list[PromptMedia] = []
        for turn in reversed(path):
            media += (one.moved(len(tokens)) for one in turn.media)
            tokens += (*turn.new_ids, *turn.action_ids)
        return rendered, tuple(tokens), tuple(media)


@dataclass(frozen=True, slots=True)
class _KnownConversation:
    """A conversation that ends with a sampled action. Later prompts of the session can continue the conversation."""

    messages: Messages
    action: Action
    tools: tuple[ToolSpec, ...]
    has_end: bool  # whether the action ends with an end token

    @property
    def length(self) -> tuple[int, int]:
        return len(self.messages), len(self.action.text)

    def begins(self, messages: Messages) -> bool:
        given = messages[: len(self.messages)]
        # an action that was cut can be continued by text of an agent program
        if given and not self.has_end and given[-1].text.startswith(self.action.text):
            given = (*given[:-1], replace(given[-1], parts=self.messages[-1].parts))
        return given == self.messages


class _EngineFailure(Exception):
    """Raised if the engine cannot generate an action."""


class _RenderError(Exception):
    """Raised if the conversation cannot be rendered, or the action cannot be parsed."""


async def close_quietly(action: str, closing: Awaitable[None]) -> None:
    """Await ``closing`` for at most CLOSE_SECONDS. A warning about a failure begins with ``action``."""
    try:
        with isolate(RuntimeError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await run_detached(closing)
    except RuntimeError as failure:
        log.warning("%s failed: %s", action, failure)

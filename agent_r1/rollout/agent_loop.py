"""The agent loop: one attempt at one task, from the first prompt to the end, whatever happens.

Nothing that an environment or an engine does leaves this module as an exception: it becomes the
trajectory's status and reason. Only cancellation from outside passes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial

from agent_r1.core.environment import Env, Episode, RolloutContext, Transition
from agent_r1.core.inference import Completion, InferenceEngine, Prompt, SamplingParams
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Status, Trajectory, Turn, TurnKind
from agent_r1.renderers.protocol import RenderedPrompt
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.context_policy import Append, ContextPolicy, History, Messages, with_request
from agent_r1.rollout.user_code import validate_messages, validate_transition, isolate, told
from agent_r1.tools.execution import run_detached

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long an episode may take to close; after that it is left alone."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A policy that can act: an engine behind a chat format.

    ``sampling.max_tokens`` bounds one turn; ``context`` bounds the tokens of a state and its action.
    ``seed`` is the run's root seed, from which every turn draws its own. ``rule`` says what of the episode it sees.
    """

    engine: InferenceEngine
    renderer: TemplateRenderer
    sampling: SamplingParams
    context: int
    seed: int = 0
    rule: ContextPolicy = field(default_factory=Append)

    async def live(self, env: Env, task: Task, context: RolloutContext) -> Trajectory:
        """One attempt. Returns a trajectory with the turns that were completed, however it ended."""
        life = _Life(self, env, task, context)
        try:
            async with asyncio.timeout_at(context.deadline):
                await life.run()
        except _Failure as failure:
            life.status, life.reason = failure.status, failure.reason
        except TimeoutError:
            life.status, life.reason = Status.CANCELLED, "the episode ran past its deadline"
        except Exception as error:
            # What an environment gave is only seen to be wrong where it is used.
            life.status, life.reason = Status.ENVIRONMENT_FAILED, told(error)
        finally:
            await life.close()
        return life.trajectory()


class _Failure(Exception):
    """Carries a failure to the end of the episode."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def _ends(status: Status) -> AbstractContextManager[None]:
    """What is raised inside ends the episode with this status."""
    return isolate(partial(_Failure, status))


@dataclass(frozen=True, slots=True)
class _State:
    """What the policy sees: the messages ``said``, their ``view``, all its ``ids``, and the turn that it continues
    (None: a new branch, of which the view holds every token)."""

    said: Messages
    view: RenderedPrompt
    ids: tuple[int, ...]
    parent: int | None = None


@dataclass(slots=True)
class _Life:
    """The state of one attempt under way."""

    agent: Agent
    env: Env
    task: Task
    context: RolloutContext
    began: float = field(default_factory=time.perf_counter)
    episode: Episode | None = None
    lived: History = field(default_factory=lambda: History(()))
    turns: list[Turn] = field(default_factory=list)
    status: Status = Status.COMPLETED
    reason: str | None = None

    async def run(self) -> None:
        """The loop: state -> action -> what happens -> next state."""
        with _ends(Status.ENVIRONMENT_FAILED):
            self.episode = await run_detached(self.env.open(self.task, self.context))
            self.lived = History(validate_messages(self.episode.start))
            state = self._opened(self.lived.messages)
        while len(state.ids) < self.agent.context:
            completion = await self._sample(state)
            action = self._parsed(completion)
            transition = await self._happen(action)
            self._remember(state, completion, action, transition)
            if transition.end is not None:
                self.status = _ending(transition, completion)
                return
            state = await self._next(state, completion, action, transition.messages)
        self.status = Status.OUT_OF_TOKENS
        if not self.turns:
            _warn_of_long_opening(self.agent.context)

    async def _sample(self, state: _State) -> Completion:
        """The tokens of an action."""
        agent, turn = self.agent, len(self.turns)
        sampling = replace(
            agent.sampling,
            max_tokens=min(agent.sampling.max_tokens, agent.context - len(state.ids)),
            stop_token_ids=agent.renderer.stop_token_ids,
            stop_condition=agent.renderer.stop_condition(self.env.tools),
            seed=self.context.id.seed(agent.seed, turn),
        )
        with _ends(Status.ENGINE_FAILED):
            completion = await agent.engine.generate(Prompt(state.ids), sampling, session_id=str(self.context.id))
        if completion.finish_reason == "cancelled":
            raise _Failure(Status.CANCELLED, "the engine cancelled the generation")
        return _first(completion, agent.renderer.action_length(completion.token_ids, self.env.tools))

    def _parsed(self, completion: Completion) -> Action:
        return self.agent.renderer.parse(completion.token_ids, len(self.turns), self.env.tools)

    async def _happen(self, action: Action) -> Transition:
        assert self.episode is not None
        with _ends(Status.ENVIRONMENT_FAILED):
            return validate_transition(await run_detached(self.episode.step(action)))

    def _remember(
        self,
        state: _State,
        completion: Completion,
        action: Action,
        transition: Transition,
        kind: TurnKind = "act",
    ) -> None:
        renderer, tools = self.agent.renderer, self.env.tools
        self.turns.append(
            Turn(
                index=len(self.turns),
                parent=state.parent,
                new_ids=state.view.token_ids,
                action_ids=completion.token_ids,
                logprobs=completion.logprobs,
                version_spans=completion.version_spans,
                finish_reason=completion.finish_reason,
                action=action,
                observation=transition.messages,
                results=transition.results,
                rewards=transition.rewards,
                kind=kind,
                call_rewards=transition.call_rewards,
                call_ends=renderer.call_ends(completion.token_ids, tools) if action.message.calls else (),
            )
        )

    def _opened(self, messages: Messages) -> _State:
        """A state that continues none."""
        view = self.agent.renderer.render(messages, self.env.tools)
        return _State(messages, view, view.token_ids)

    def _grown(self, state: _State, completion: Completion, action: Action, observed: Messages) -> _State:
        """The state that follows, with nothing left out of it."""
        view = self.agent.renderer.bridge_to_next_turn(
            state.view, state.said, action, completion.token_ids, observed, self.env.tools
        )
        said = (*state.said, action.message, *observed)
        if view is None:
            return self._opened(said)
        return _State(said, view, state.ids + completion.token_ids + view.token_ids, self.turns[-1].index)

    async def _next(self, state: _State, completion: Completion, action: Action, observed: Messages) -> _State:
        """The next state, as the context rule wants it: the one that grew, or a new branch."""
        rule = self.agent.rule
        self.lived = self.lived.after(action.message, observed)
        with _ends(Status.ENVIRONMENT_FAILED):
            grown = self._grown(state, completion, action, observed)
            fits = self._fits(grown)
            if fits and len(grown.ids) <= rule.after:
                return grown
            request = rule.asks(self.lived, fits)
            asked = None if request is None else self._asked(state, completion, action, observed, request)
        if asked is not None:
            await self._sum_up(asked)
        with _ends(Status.ENVIRONMENT_FAILED):
            return self._shown(grown)

    def _fits(self, state: _State) -> bool:
        """Whether there is room for a whole action."""
        return len(state.ids) + self.agent.sampling.max_tokens <= self.agent.context

    def _shown(self, grown: _State) -> _State:
        """The mildest view of what was lived that has room, or the tightest; what was seen goes on where it can."""
        shown = grown
        for messages in self.agent.rule.views(self.lived):
            shown = grown if messages == grown.said else self._opened(messages)
            if self._fits(shown):
                break
        return shown

    def _asked(
        self, state: _State, completion: Completion, action: Action, observed: Messages, request: Message
    ) -> _State | None:
        """The state in which the policy sums up: all it saw, or the latest of it that has room; None where none has."""
        asked = self._grown(state, completion, action, with_request(observed, request))
        if self._fits(asked):
            return asked
        views = (self._opened(with_request(messages, request)) for messages in self.agent.rule.views(self.lived))
        return next(filter(self._fits, views), None)

    async def _sum_up(self, asked: _State) -> None:
        completion = await self._sample(asked)
        action = self._parsed(completion)
        self._remember(asked, completion, action, Transition(()), "summary")
        if notes := self.agent.renderer.spoken_text(action, self.env.tools):
            self.lived = replace(self.lived, exchanges=(), notes=notes)

    async def close(self) -> None:
        """Give back what the attempt held. A failing close is logged: the attempt is over all the same."""
        await self._give_back("releasing the session", self.agent.engine.release(str(self.context.id)))
        if self.episode is not None:
            await self._give_back("closing the episode", self.episode.close())

    async def _give_back(self, what: str, giving: Awaitable[None]) -> None:
        try:
            with isolate(RuntimeError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await run_detached(giving)
        except RuntimeError as failure:
            log.warning("%s of %s failed: %s", what, self.context.id, failure)

    def trajectory(self) -> Trajectory:
        return Trajectory(
            attempt=self.context.id,
            task_id=self.task.id,
            turns=tuple(self.turns),
            status=self.status,
            truncated=self.status in (Status.OUT_OF_TURNS, Status.OUT_OF_TOKENS),
            reason=self.reason,
            start=self.lived.start,
            seconds=time.perf_counter() - self.began,
        )


@cache
def _warn_of_long_opening(context: int) -> None:
    """Once, because it may be so of many tasks."""
    told = "the opening of an episode leaves no room in a context of %d tokens: nothing is learned of such episodes"
    log.warning(told, context)


def _ending(transition: Transition, completion: Completion) -> Status:
    if transition.end == "truncated":
        return Status.OUT_OF_TURNS
    return Status.OUT_OF_TOKENS if completion.finish_reason == "length" else Status.COMPLETED


def _first(completion: Completion, count: int) -> Completion:
    """The first ``count`` tokens of a completion: a text that was sampled past an end that no token marks."""
    if count == len(completion.token_ids):
        return completion
    version_spans = tuple(span for span in completion.version_spans if span.start < count)
    return Completion(completion.token_ids[:count], completion.logprobs[:count], "stop", version_spans)

"""The agent loop: one attempt of a policy in an environment.

A failure of the environment or the engine becomes the status and the reason of the trajectory. The agent loop raises an
exception only if it is cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from agent_r1.core.environment import Env, Episode, ModelClient, RolloutContext, Transition, env_of
from agent_r1.core.inference import InferenceEngine, Prompt, SamplingParams
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.profile import measure
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY, AttemptId, Status, Trajectory, TurnKind
from agent_r1.envs.multi_agent import GAME_SECONDS, Game, Match, PlayerEnv
from agent_r1.renderers.protocol import Renderer
from agent_r1.rollout.api_agent import ApiAgent
from agent_r1.rollout.context_policy import Append, ContextPolicy, Exchange, History, Messages, with_request
from agent_r1.rollout.session import Conversation, Session, SessionPrompt, Stopped, close_quietly
from agent_r1.rollout.user_code import format_error, isolate, validate_messages, validate_transition
from agent_r1.tools.execution import run_detached

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agent:
    """A policy and everything that it needs to act."""

    engine: InferenceEngine
    renderer: Renderer
    params: SamplingParams  # max_tokens is the largest number of tokens of one action
    context_length: int  # the largest number of tokens of a prompt and its action together
    seed: int = 0  # of the run; the seed of each turn is derived from it
    context_policy: ContextPolicy = field(default_factory=Append)  # how much of a long episode the policy sees

    def open_session(self, attempt: AttemptId) -> Session:
        return Session(self.engine, self.renderer, self.params, self.context_length, attempt, seed=self.seed)

    def client(self, seed: int) -> ModelClient:
        return chat_client(self.engine, self.renderer, replace(self.params, seed=seed))


def chat_client(engine: InferenceEngine, renderer: Renderer, params: SamplingParams) -> ModelClient:
    """Return a client that answers a conversation with a message sampled from ``engine``."""

    async def complete(messages: tuple[Message, ...], /) -> Message:
        prompt = renderer.render(messages, ())
        # The seed depends on the conversation alone and not on the order of requests, which differs from run to run.
        images = "".join(one.image.sha256 for one in prompt.media)
        digest = hashlib.sha256(f"{params.seed}|{prompt.text}{images}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1  # 63 bits
        sampling = replace(params, stop_token_ids=renderer.stop_token_ids, seed=seed)
        completion = await engine.generate(Prompt(prompt.token_ids, prompt.media), sampling)
        return renderer.parse(completion.token_ids).message

    return complete


@dataclass(frozen=True, slots=True)
class AgentLoop:
    """A rollout in which an agent acts in an environment until the episode ends."""

    agent: Agent | ApiAgent
    env: Env

    async def run(self, task: Task, context: RolloutContext) -> tuple[Trajectory]:
        """Make one attempt. The trajectory of a failed attempt holds the turns that were completed before."""
        agent = self.agent
        context = replace(context, models={"policy": agent.client(context.seed), **context.models})
        rollout = _AgentRollout(agent, self.env, task, context, agent.open_session(context.id))
        try:
            async with asyncio.timeout_at(context.deadline):
                await rollout.run()
        except _RolloutEnd as end:
            rollout.status, rollout.reason = end.status, end.reason
        except TimeoutError:
            rollout.status, rollout.reason = Status.CANCELLED, "the episode ran past its deadline (episode_seconds)"
        except Exception as error:  # for example, a value of the environment can raise an exception when it is used
            rollout.status, rollout.reason = Status.ENVIRONMENT_FAILED, format_error(error)
        finally:
            await rollout.session.close()
            if rollout.episode is not None:
                with measure("tools"):
                    await close_quietly(f"closing the episode of {context.id}", rollout.episode.close())
        status, reason = rollout.status, rollout.reason
        return (rollout.session.trajectory(task.id, status, reason=reason, start=rollout.history.start),)


class _RolloutEnd(Exception):
    def __init__(self, status: Status, reason: str | None) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


_environment_failed = partial(_RolloutEnd, Status.ENVIRONMENT_FAILED)
"""Returns the exception that ends a rollout because code of the environment failed."""


@dataclass(slots=True)
class _AgentRollout:
    agent: Agent | ApiAgent
    env: Env
    task: Task
    context: RolloutContext
    session: Conversation
    own_tools: tuple[ToolSpec, ...] | None = None  # recorded with each turn, if the task has an environment of its own
    episode: Episode | None = None
    history: History = field(default_factory=lambda: History(()))
    status: Status = Status.COMPLETED
    reason: str | None = None

    async def run(self) -> None:
        with isolate(_environment_failed):
            if (env := env_of(self.env, self.task)) is not self.env:
                self.env, self.own_tools = env, env.tools
            with measure("tools"):
                self.episode = await run_detached(self.env.open(self.task, self.context))
            start = validate_messages(self.episode.start)
            self.history = History(start)
            prompt = self.session.new_branch(start, self.env.tools)
        while True:
            action = await self._sample(prompt)
            with isolate(_environment_failed), measure("tools"):
                transition = validate_transition(await run_detached(self.episode.step(action)))
            turn = self.session.observe(transition, self.own_tools)
            if transition.end is not None:
                if transition.end == "truncated":
                    self.status = Status.OUT_OF_TURNS
                elif turn.finish_reason == "length":
                    self.status = Status.OUT_OF_TOKENS
                return
            prompt = await self._next_prompt(prompt, action, transition.messages)

    async def _sample(self, prompt: SessionPrompt, kind: TurnKind = "act") -> Action:
        result = await self.session.sample(prompt, kind)
        if isinstance(result, Stopped):
            if result.status is Status.OUT_OF_TOKENS and not self.session.turns:
                _warn_about_long_opening(self.agent.context_length)
            raise _RolloutEnd(result.status, result.reason)
        return result

    async def _next_prompt(self, prompt: SessionPrompt, action: Action, observation: Messages) -> SessionPrompt:
        # The result continues ``prompt``, unless the context policy rewrites the context.
        policy, session = self.agent.context_policy, self.session
        exchanges = (*self.history.exchanges, Exchange(action.message, observation))
        self.history = replace(self.history, exchanges=exchanges)
        before = (*prompt.messages, action.message)
        with isolate(_environment_failed):
            continued = session.prompt((*before, *observation), self.env.tools)
            fits = session.fits(continued)
            if fits and len(continued.token_ids) <= policy.after_tokens:
                return continued
            request = policy.summary_request(self.history, fits)
            summary_prompt = None if request is None else self._summary_prompt(before, observation, request)
        if summary_prompt is not None:
            await self._summarize(summary_prompt)
        with isolate(_environment_failed):
            # Take the first context that leaves room for a whole action, or the last one if no context leaves room.
            prompt = continued
            for messages in policy.candidates(self.history):
                unchanged = messages == continued.messages
                prompt = continued if unchanged else session.new_branch(messages, self.env.tools)
                if session.fits(prompt):
                    break
            return prompt

    def _summary_prompt(self, before: Messages, observation: Messages, request: Message) -> SessionPrompt | None:
        prompt = self.session.prompt((*before, *with_request(observation, request)), self.env.tools)
        if self.session.fits(prompt):
            return prompt
        shorter = (
            self.session.new_branch(with_request(messages, request), self.env.tools)
            for messages in self.agent.context_policy.candidates(self.history)
        )
        return next(filter(self.session.fits, shorter), None)

    async def _summarize(self, prompt: SessionPrompt) -> None:
        action = await self._sample(prompt, "summary")
        self.session.observe(Transition(()), self.own_tools)
        if notes := self.session.spoken_text(action, self.env.tools):
            self.history = replace(self.history, exchanges=(), notes=notes)


@cache
def _warn_about_long_opening(context_length: int) -> None:
    message = "the opening of an episode leaves no room in a context of %d tokens: such episodes cannot be trained"
    log.warning(message, context_length)


RETURN = "return"
"""The name of the reward that holds the score of a player."""


async def play_game(
    game: Game,
    agents: Sequence[Agent],
    task: Task,
    contexts: Sequence[RolloutContext],
    seed: int,
    seconds: float = GAME_SECONDS,
) -> tuple[Trajectory, ...]:
    """Play one match, and return one trajectory for each player: agent and context. One agent can be several players.

    If the game fails or takes more than ``seconds`` seconds, no trajectory has a reward or can be trained.
    """
    match = Match(game, task, seed, len(agents), seconds)
    episodes = (
        _play_episode(agent, env, task, context)
        for agent, env, context in zip(agents, match.players, contexts, strict=True)
    )
    returns, trajectories = await asyncio.gather(match.play(), asyncio.gather(*episodes))
    if returns is None:
        return tuple(_without_result(trajectory) for trajectory in trajectories)
    return tuple(
        replace(_excuse_idle_player(env, trajectory), rewards={RETURN: earned})
        for env, trajectory, earned in zip(match.players, trajectories, returns, strict=True)
    )


async def _play_episode(agent: Agent, env: PlayerEnv, task: Task, context: RolloutContext) -> Trajectory:
    try:
        (trajectory,) = await AgentLoop(agent, env).run(task, context)
        return trajectory
    finally:
        await env.close()


def _excuse_idle_player(env: PlayerEnv, trajectory: Trajectory) -> Trajectory:
    # a player that was asked nothing has a score and no turns
    if env.player.has_had_turn or trajectory.status != Status.ENVIRONMENT_FAILED:
        return trajectory
    return replace(trajectory, status=Status.COMPLETED, reason=None)


def _without_result(trajectory: Trajectory) -> Trajectory:
    if STATUS_POLICY[trajectory.status] != "train":
        return trajectory
    return replace(trajectory, status=Status.REWARD_FAILED, reason="the game had no result")

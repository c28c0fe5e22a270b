"""An environment worker: it runs episodes of environments over HTTP, for runs on other machines.

Everyone who can reach the worker and has its token can run the tools of its environments. So a worker needs a token,
unless it listens only on a loopback address. The worker has no TLS.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agent_r1.core.environment import Env, Episode, ModelClient, RolloutContext
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task, hash_tasks
from agent_r1.core.trajectory import AttemptId
from agent_r1.rollout.session import close_quietly
from agent_r1.rollout.user_code import format_error, isolate, validate_messages, validate_transition
from agent_r1.store.rows import decode_messages, encode_messages
from agent_r1.tools.execution import run_detached
from agent_r1.web import BackgroundServer, RefusedBody, read_body
from agent_r1.workers.protocol import (
    ENVIRONMENT_FAILED,
    MAX_BODY,
    TOKEN_VARIABLE,
    ModelAnswer,
    ModelQuery,
    Opened,
    OpenRequest,
    Stepped,
    StepRequest,
    TaskContent,
    WorkerDescription,
    decode_step,
    decode_task,
    encode_transition,
    images_of,
    with_images,
)

EpisodeAnswer = Opened | Stepped | ModelQuery
"""The result of opening an episode or of a step, or the environment's next query to a model."""


class EnvironmentFailure(AgentR1Error):
    """Raised if the environment raises an error, or returns a value that cannot be used or sent."""


@dataclass(slots=True)
class WorkerSession:
    """An episode on a worker."""

    name: str
    used: float  # when the last request ended, on the clock of the event loop
    episode: Episode | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a request uses the episode
    _queries: asyncio.Queue[ModelQuery] = field(default_factory=asyncio.Queue)
    _answers: dict[int, asyncio.Future[Message]] = field(default_factory=dict)
    _num_queries: int = 0
    _work: asyncio.Task[Opened | Stepped] | None = None

    async def open(self, env: Env, task: Task, context: RolloutContext) -> EpisodeAnswer:
        async def work() -> Opened | Stepped:
            self.episode = await run_detached(env.open(task, context))
            start = validate_messages(self.episode.start)
            return Opened(episode=self.name, start=encode_messages(start), images=images_of(start))

        return await self._start(work)

    async def step(self, action: Action) -> EpisodeAnswer:
        episode = self.episode
        if episode is None or self._work is not None:
            raise EnvironmentFailure("the episode was not opened, or still works on another request")

        async def work() -> Opened | Stepped:
            return encode_transition(validate_transition(await run_detached(episode.step(action))))

        return await self._start(work)

    async def answer(self, answer: ModelAnswer) -> EpisodeAnswer:
        """Pass a model's answer to the environment, which then continues the interrupted open or step."""
        waiting = self._answers.pop(answer.query, None)
        if waiting is None:
            raise EnvironmentFailure(f"no query {answer.query} waits for an answer")
        if not waiting.done():  # the environment may no longer wait
            if answer.error is None:
                waiting.set_result(with_images(decode_messages(answer.messages), answer.images)[0])
            else:
                waiting.set_exception(AgentR1Error(answer.error))
        return await self._advance()

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        if self.episode is not None:
            await close_quietly(f"closing the episode {self.name}", self.episode.close())

    async def _start(self, work: Callable[[], Awaitable[Opened | Stepped]]) -> EpisodeAnswer:
        async def isolated() -> Opened | Stepped:
            with isolate(EnvironmentFailure):
                return await work()

        self._work = asyncio.create_task(isolated())
        return await self._advance()

    async def _advance(self) -> EpisodeAnswer:
        # Wait for the end of the work, or for a query that it needs answered first.
        assert self._work is not None
        query = asyncio.ensure_future(self._queries.get())
        try:
            await asyncio.wait([self._work, query], return_when=asyncio.FIRST_COMPLETED)
            if query.done():
                return query.result()
            work, self._work = self._work, None
            if work.cancelled():
                raise EnvironmentFailure("the episode was closed")
            return work.result()
        finally:
            query.cancel()

    def model(self, role: str) -> ModelClient:
        """Return a model that forwards the environment's queries to the run."""

        async def respond(messages: tuple[Message, ...], /) -> Message:
            number = self._num_queries
            self._num_queries += 1
            answer = asyncio.get_running_loop().create_future()
            self._answers[number] = answer
            encoded, images = encode_messages(messages), images_of(messages)
            query = ModelQuery(episode=self.name, query=number, role=role, messages=encoded, images=images)
            self._queries.put_nowait(query)
            return await answer

        return respond


_Body = TypeVar("_Body", bound=BaseModel)
Endpoint = Callable[[Request], Awaitable[Response]]

SHORTEST_TOKEN = 8
BODY_SECONDS = 60.0
"""The time limit for the arrival of a request's body, in seconds."""

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker."""

    episodes: int = 1024  # open at the same time
    idle_seconds: float = 900.0  # an episode is closed after this time without a request


class _RefusedRequest(AgentR1Error):
    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class EnvironmentWorker:
    """A server for episodes of ``envs``, in the event loop of the caller. ``tasks`` returns the tasks of a split."""

    def __init__(
        self,
        envs: Mapping[str, Env],
        tasks: Callable[[str], Sequence[Task]],
        description: WorkerDescription,
        limits: WorkerLimits = WorkerLimits(),
        *,
        token: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        check_token(host, token)
        self._envs, self._description, self._limits, self._token = envs, description, limits, token
        self._host, self._port = host, port
        self._tasks = cache(lambda split: {task.id: task for task in tasks(split)})
        self._sessions: dict[str, WorkerSession] = {}
        self._server: BackgroundServer | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        if self._server is None:
            raise RuntimeError("the worker was not started")
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._server.port}"

    @property
    def num_episodes(self) -> int:
        return len(self._sessions)

    def start(self) -> None:
        """Start to answer requests in the event loop of the caller. Raise InvalidInput if the port is in use."""
        self._server = BackgroundServer(self._app(), self._host, self._port)
        self._sweeper = asyncio.create_task(self._close_idle())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            await self._server.close()
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(session.close() for session in sessions.values()))

    def _app(self) -> Starlette:
        episode = "/episodes/{episode}"
        routes = [
            Route("/health", self._endpoint(self._health), methods=["GET"]),
            Route("/episodes", self._endpoint(self._open), methods=["POST"]),
            Route(f"{episode}/step", self._endpoint(self._step), methods=["POST"]),
            Route(f"{episode}/answer", self._endpoint(self._answer), methods=["POST"]),
            Route(episode, self._endpoint(self._close), methods=["DELETE"]),
        ]
        hosts = (*LOOPBACK_NAMES, self._host) if is_loopback(self._host) else ("*",)
        return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))])

    def _endpoint(self, handler: Callable[[Request], Awaitable[BaseModel | None]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            try:
                self._authenticate(request)
                answer = await handler(request)
                return JSONResponse({} if answer is None else answer.model_dump(mode="python"))
            except _RefusedRequest as error:
                return _error(error.status, str(error))
            except EnvironmentFailure as error:
                return _error(ENVIRONMENT_FAILED, str(error))
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads this response
            except Exception as error:
                log.exception("a request failed")
                return _error(500, format_error(error))

        return endpoint

    def _authenticate(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            raise _RefusedRequest(401, f"the token is missing or wrong: set {TOKEN_VARIABLE}")
        # before a browser sends this type to another server, it asks the server, and the worker does not answer
        if request.method == "POST" and request.headers.get("content-type") != "application/json":
            raise _RefusedRequest(415, "send application/json")

    async def _health(self, request: Request) -> BaseModel:
        return self._description

    async def _open(self, request: Request) -> BaseModel:
        given = await _read(OpenRequest, request)
        env = self._envs.get(given.environment)
        if env is None:
            raise _RefusedRequest(404, f"no environment {given.environment!r}; there are {', '.join(self._envs)}")
        if len(self._sessions) >= self._limits.episodes:
            raise _RefusedRequest(503, f"{self._limits.episodes} episodes are open, the limit of this worker")
        now = asyncio.get_running_loop().time()
        session = WorkerSession(secrets.token_hex(16), now)
        deadline = None if given.seconds is None else now + given.seconds
        models = {role: session.model(role) for role in given.models}
        context = RolloutContext(AttemptId(*given.attempt), given.seed, deadline, models)
        self._sessions[session.name] = session
        try:
            return await self._work(session, partial(session.open, env, self._task(given), context))
        except BaseException:
            await self._remove(session.name)
            raise

    def _task(self, request: OpenRequest) -> Task:
        given = request.task
        if isinstance(given, TaskContent):
            return decode_task(given, request.images)
        found = self._tasks(given.split).get(given.id)
        if found is None or hash_tasks([found]) != given.sha256:
            raise EnvironmentFailure(f"the worker has no task {given.id!r} of the split {given.split!r} with this data")
        return found

    async def _step(self, request: Request) -> BaseModel:
        session, action = self._session(request), decode_step(await _read(StepRequest, request))
        return await self._work(session, partial(session.step, action))

    async def _answer(self, request: Request) -> BaseModel:
        session, answer = self._session(request), await _read(ModelAnswer, request)
        return await self._work(session, partial(session.answer, answer))

    async def _close(self, request: Request) -> None:
        await self._remove(self._session(request).name)

    def _session(self, request: Request) -> WorkerSession:
        session = self._sessions.get(request.path_params["episode"])
        if session is None:
            raise _RefusedRequest(404, "no such episode: it was closed, or had no request for too long")
        return session

    async def _work(self, session: WorkerSession, work: Callable[[], Awaitable[EpisodeAnswer]]) -> EpisodeAnswer:
        async with session.lock:
            try:
                return await work()
            finally:
                session.used = asyncio.get_running_loop().time()

    async def _remove(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            await session.close()

    async def _close_idle(self) -> None:
        limit = self._limits.idle_seconds
        while True:
            await asyncio.sleep(min(limit / 4, 30.0))
            now = asyncio.get_running_loop().time()
            idle = [one.name for one in self._sessions.values() if not one.lock.locked() and now - one.used > limit]
            await asyncio.gather(*map(self._remove, idle))


def check_token(host: str, token: str) -> None:
    """Raise InvalidInput if ``token`` is too short, or if there is none ("") and ``host`` is no loopback address."""
    do = f"give at least {SHORTEST_TOKEN} printable ASCII characters in --token or {TOKEN_VARIABLE}"
    if token and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise InvalidInput("token", got=f"{len(token)} characters", do=do)
    if not token and not is_loopback(host):
        raise InvalidInput("token", got=f"none, and the worker listens on {host}", do=f"{do}, or --host 127.0.0.1")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _error(status: int, line: str) -> Response:
    return JSONResponse({"error": line}, status)


async def _read(kind: type[_Body], request: Request) -> _Body:
    try:
        return kind.model_validate(json.loads(await read_body(request, MAX_BODY, BODY_SECONDS)))
    except RefusedBody as error:
        raise _RefusedRequest(error.status, str(error)) from error
    except (ValidationError, ValueError, RecursionError) as error:
        raise _RefusedRequest(400, f"the body is not a valid {kind.__name__}") from error

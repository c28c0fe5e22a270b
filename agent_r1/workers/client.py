"""The client of environment workers: a pool of workers, and an environment whose episodes run on these workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from agent_r1.core.environment import Env, ModelClient, RolloutContext, Transition, env_of
from agent_r1.core.errors import AgentR1Error, InvalidInput, read_credential
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.rollout.user_code import format_error
from agent_r1.store.rows import decode_messages, encode_messages
from agent_r1.workers.protocol import (
    ENVIRONMENT_FAILED,
    TOKEN_VARIABLE,
    EnvironmentConfig,
    ModelAnswer,
    ModelQuery,
    Opened,
    OpenRequest,
    Stepped,
    WorkerDescription,
    decode_transition,
    encode_step,
    encode_task,
    images_of,
    with_images,
)

CONNECT_SECONDS = 10.0
STALL_SECONDS = 60.0  # between two health reports of a worker with requests; then its attempts are repeated elsewhere
RECHECK_SECONDS = 5.0
"""The time between two checks of a failed worker, in seconds."""

_Kind = TypeVar("_Kind", bound=BaseModel)

_ANSWER: TypeAdapter[Opened | Stepped | ModelQuery] = TypeAdapter(Opened | Stepped | ModelQuery)


class WorkerError(AgentR1Error):
    """Raised if a worker cannot be reached, hangs, or refuses a request. The attempt is then repeated."""


class RemoteEnvironmentError(AgentR1Error):
    """Raised if an environment on a worker raised an error. The message has the error and the line of its origin."""


def check_workers(config: EnvironmentConfig, expected: WorkerDescription) -> None:
    """Raise InvalidInput if a worker cannot be reached, or if its description differs from ``expected``."""
    for url in config.workers:
        try:
            response = httpx.get(f"{url}/health", headers=_headers(), timeout=STALL_SECONDS, trust_env=False)
            difference = _difference(_read_description(response), expected)
        except (WorkerError, httpx.HTTPError, httpx.InvalidURL) as error:
            do = f"start a worker there with 'agent-r1 serve-env' ({error or type(error).__name__})"
            raise InvalidInput("environment worker", got=url, do=do) from error
        if difference:
            raise InvalidInput("environment worker", got=f"{url}, {difference}", do="start it with what the run has")


def _headers() -> dict[str, str]:
    token = read_credential(TOKEN_VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token else {}


def _read_description(response: httpx.Response) -> WorkerDescription:
    if response.is_error:
        raise WorkerError(_error_line(response))
    try:
        return WorkerDescription.model_validate_json(response.content)
    except ValidationError as error:
        raise WorkerError("what answers is not an environment worker") from error


def _error_line(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: {response.text[:200]}"


def _difference(found: WorkerDescription, expected: WorkerDescription) -> str:
    if found.version != expected.version:
        return f"with agent-r1 {found.version} instead of {expected.version}"
    if found.taskset != expected.taskset:
        return f"with the task set {found.taskset!r} instead of {expected.taskset!r}"
    both = found.fingerprints.keys() & expected.fingerprints.keys()
    others = sorted(name for name in both if found.fingerprints[name] != expected.fingerprints[name])
    return f"with other {' and '.join(others)} (by their sha256)" if others else ""


class WorkerConnection:
    """The connection to a worker. A failed worker gets no requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_episodes = 0
        self.failure: str | None = None  # None: the worker is live
        self.checked = 0.0  # when it failed or was checked last, on the clock of the event loop
        self._requests: set[asyncio.Task[httpx.Response]] = set()
        self._watcher: asyncio.Task[None] | None = None
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        # Each request opens a new connection. An open connection could not be used again: the checks before a run have
        # another event loop than the run, and the worker can close the connection.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url=url, headers=_headers(), timeout=timeout, limits=limits, trust_env=False
        )

    async def converse(
        self, path: str, request: BaseModel, kind: type[_Kind], models: Mapping[str, ModelClient]
    ) -> _Kind:
        """Send a request, answer queries to ``models``, and return the worker's answer."""
        answer = await self._post(path, request)
        while isinstance(answer, ModelQuery):
            answer = await self._post(f"/episodes/{answer.episode}/answer", await _ask(answer, models))
        if not isinstance(answer, kind):
            raise WorkerError(f"{self.url} answered {type(answer).__name__} instead of {kind.__name__}")
        return answer

    async def _post(self, path: str, body: BaseModel) -> Opened | Stepped | ModelQuery:
        response = await self._request("POST", path, json.dumps(body.model_dump(mode="python")).encode())
        if response.status_code == ENVIRONMENT_FAILED:
            raise RemoteEnvironmentError(_error_line(response))
        if response.is_error:
            raise WorkerError(f"{self.url} refused a request: {_error_line(response)}")
        try:
            return _ANSWER.validate_python(json.loads(response.content))
        except (ValidationError, ValueError) as error:
            raise WorkerError(f"{self.url} answered something else than an environment worker") from error

    async def delete(self, path: str) -> None:
        """Close an episode, if the worker has not failed."""
        # A failed worker that still runs closes idle episodes itself.
        if self.failure is None:
            await self._request("DELETE", path, b"")

    async def check(self, expected: WorkerDescription) -> None:
        """Check the description of a failed worker. If it agrees with ``expected``, the worker is live again."""
        self.checked = asyncio.get_running_loop().time()
        try:
            difference = _difference(await self._describe(), expected)
        except (WorkerError, httpx.HTTPError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        else:
            self.failure = f"it came back {difference}" if difference else None

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        await self._client.aclose()

    async def _describe(self) -> WorkerDescription:
        return _read_description(await self._client.get("/health", timeout=STALL_SECONDS / 2))

    async def _request(self, method: str, path: str, content: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        if self.failure is not None:
            raise WorkerError(f"{self.url} failed: {self.failure}")
        request = asyncio.create_task(self._client.request(method, path, content=content, headers=headers))
        self._requests.add(request)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        try:
            await asyncio.wait([request])
            if request.cancelled():
                raise WorkerError(f"{self.url} failed: {self.failure}")
            return request.result()
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}"
            await self._check_health(reason)  # perhaps only this request failed
            raise WorkerError(f"{self.url} failed: {reason}") from error
        finally:
            request.cancel()  # if the caller was cancelled
            self._requests.discard(request)

    async def _watch(self) -> None:
        # A worker reports its health even while a tool is slow.
        while self._requests:
            await asyncio.sleep(STALL_SECONDS / 2)
            if not self._requests:
                return
            await self._check_health("it does not report its health")

    async def _check_health(self, reason: str) -> None:
        try:
            await self._describe()
        except (WorkerError, httpx.HTTPError) as error:
            self._fail(f"{reason}: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self.failure, self.checked = reason, asyncio.get_running_loop().time()
        for request in self._requests:
            request.cancel()


class WorkerPool:
    """The workers of a run. A new episode is opened on the live worker with the fewest episodes.

    A worker fails if it cannot be reached, or does not report its health for ``STALL_SECONDS``. Then all its
    episodes fail. A failed worker gets no episodes until a check shows that its description agrees with
    ``expected``, the description that the run needs.
    """

    def __init__(self, config: EnvironmentConfig, expected: WorkerDescription) -> None:
        self._limit, self._expected = config.episodes, expected
        self._workers = [WorkerConnection(url) for url in config.workers]
        self._changed = asyncio.Event()
        self._checking: asyncio.Task[None] | None = None

    async def acquire(self) -> WorkerConnection:
        """Return a worker for a new episode, when one has room. Raise WorkerError if none is live."""
        while True:
            self._changed.clear()
            checking = self._check_failed()
            live = [worker for worker in self._workers if worker.failure is None]
            if not live and checking is not None:
                await asyncio.wait([checking])
                live = [worker for worker in self._workers if worker.failure is None]
            if not live:
                reasons = "; ".join(f"{worker.url}: {worker.failure}" for worker in self._workers)
                raise WorkerError(f"no environment worker is left ({reasons})")
            chosen = min(live, key=lambda worker: worker.num_episodes)
            if chosen.num_episodes < self._limit:
                chosen.num_episodes += 1
                return chosen
            await self._changed.wait()

    def release(self, worker: WorkerConnection) -> None:
        worker.num_episodes -= 1
        self._changed.set()

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _check_failed(self) -> asyncio.Task[None] | None:
        now = asyncio.get_running_loop().time()
        due = [one for one in self._workers if one.failure is not None and now - one.checked > RECHECK_SECONDS]
        if due and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check(due))
        return None if self._checking is None or self._checking.done() else self._checking

    async def _check(self, workers: Sequence[WorkerConnection]) -> None:
        await asyncio.gather(*(worker.check(self._expected) for worker in workers))
        self._changed.set()


class RemoteEnv:
    """An environment whose episodes run on workers, by its ``name`` there. ``env`` describes the tools."""

    def __init__(self, env: Env, name: str, pool: WorkerPool) -> None:
        self.tools: tuple[ToolSpec, ...] = env.tools
        self.pool, self._name, self._env = pool, name, env

    def for_task(self, task: Task) -> RemoteEnv:
        env = env_of(self._env, task)
        return self if env is self._env else RemoteEnv(env, self._name, self.pool)

    async def open(self, task: Task, context: RolloutContext) -> RemoteEpisode:
        request = OpenRequest(
            environment=self._name,
            task=encode_task(task),
            attempt=astuple(context.id),
            seed=context.seed,
            seconds=None if context.deadline is None else context.deadline - asyncio.get_running_loop().time(),
            models=tuple(context.models),
            images=images_of(task.messages),
        )
        worker = await self.pool.acquire()
        try:
            opened = await worker.converse("/episodes", request, Opened, context.models)
            start = with_images(decode_messages(opened.start), opened.images)
            return RemoteEpisode(start, opened.episode, worker, self.pool, context.models)
        except BaseException:
            self.pool.release(worker)
            raise


@dataclass(slots=True)
class RemoteEpisode:
    start: tuple[Message, ...]
    name: str
    worker: WorkerConnection
    pool: WorkerPool
    models: Mapping[str, ModelClient]

    async def step(self, action: Action) -> Transition:
        path = f"/episodes/{self.name}/step"
        return decode_transition(await self.worker.converse(path, encode_step(action), Stepped, self.models))

    async def close(self) -> None:
        try:
            await self.worker.delete(f"/episodes/{self.name}")
        finally:
            self.pool.release(self.worker)


async def _ask(query: ModelQuery, models: Mapping[str, ModelClient]) -> ModelAnswer:
    try:
        messages = with_images(decode_messages(query.messages), query.images)
        reply = await models[query.role](messages)
    except Exception as error:
        return ModelAnswer(query=query.query, messages=[], images={}, error=format_error(error))
    return ModelAnswer(query=query.query, messages=encode_messages([reply]), images=images_of([reply]))

"""The gateway under hostile requests: the right status codes, no traceback, and it goes on serving."""

import asyncio
import json
import resource
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from agent_episodes import ANSWER, QUESTION, RecordingEngine

from agent_r1 import web as http_server
from agent_r1.core.inference import SamplingParams
from agent_r1.core.trajectory import AttemptId
from agent_r1.gateway import server as server_module
from agent_r1.gateway.config import GatewayConfig
from agent_r1.gateway.episode import EpisodeModel
from agent_r1.gateway.server import Gateway
from agent_r1.rollout.agent_loop import Agent

BODY = {"model": "any", "messages": [QUESTION]}
CHAT = "/chat/completions"
PATHS = (CHAT, "/responses", "/messages")


class Slow(RecordingEngine):
    """Answers when ``may_answer`` is set."""

    may_answer = None

    async def generate(self, prompt, params, *, session_id=None):
        if self.may_answer is not None:
            await self.may_answer.wait()
        return await super().generate(prompt, params, session_id=session_id)


class Site:
    """A gateway with episodes; ``client`` sends requests to it."""

    def __init__(self, renderer, gateway, client):
        self.gateway, self.client, self.renderer = gateway, client, renderer
        self.engine = Slow(renderer, lambda prompt: ANSWER)
        self.sessions = {}

    def open(self, **limits):
        """Return the key of a new episode."""
        agent = Agent(self.engine, self.renderer, SamplingParams(max_tokens=40), 4000)
        session = agent.open_session(AttemptId("run", "t", 0, len(self.sessions)))
        key = self.gateway.register(EpisodeModel(agent, session, GatewayConfig(**limits)))
        self.sessions[key] = session
        return key

    async def post(self, key, path=CHAT, body=BODY, **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"} | headers
        return await self.client.post(self.gateway.base_url + path, content=content, headers=headers)


@pytest.fixture
def visit(renderer, caplog):
    def visit(test):
        async def main():
            gateway = Gateway()
            await gateway.start()
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as client:
                site = Site(renderer, gateway, client)
                try:
                    await test(site)
                    assert (await site.post(site.open())).status_code == 200
                finally:
                    await gateway.close()

        asyncio.run(main())
        ours = [record for record in caplog.records if record.name.startswith(("agent_r1", "uvicorn"))]
        assert not [record for record in ours if record.exc_info]

    return visit


def is_error(response, status, path=CHAT):
    body = response.json()
    assert response.status_code == status, body
    if path == "/messages":
        assert body["type"] == "error"
    assert set(body["error"]) >= {"type", "message"} and "Traceback" not in response.text


def test_a_key_opens_its_own_episode_until_the_episode_ends(visit):
    async def test(site):
        own, other = site.open(), site.open()
        answer = await site.post(own, "/responses", {"model": "any", "input": "Who?"})
        id = answer.json()["id"]
        follow = {"model": "any", "input": "Why?", "previous_response_id": id}
        is_error(await site.post(other, "/responses", follow), 404)
        assert (await site.post(own, "/responses", follow)).status_code == 200
        assert (len(site.sessions[own].turns), len(site.sessions[other].turns)) == (2, 0)
        site.gateway.revoke(own)
        for path in PATHS:
            is_error(await site.post(own, path), 401, path)
        assert len(site.sessions[own].turns) == 2
        for wrong in ("x", "sk-", other[:-1], other + "x", other.upper(), "\xff" * 9, "x" * 10_000):
            headers = {"Authorization": b"Bearer " + wrong.encode("latin-1")}
            is_error(await site.client.post(site.gateway.base_url + CHAT, json=BODY, headers=headers), 401)
        is_error(await site.client.get(f"{site.gateway.base_url}/models"), 401)
        models = await site.client.get(f"{site.gateway.base_url}/models", headers={"x-api-key": other})
        assert [model["id"] for model in models.json()["data"]] == ["policy"]

    visit(test)


def test_a_request_in_progress_ends_with_its_episode(visit):
    async def test(site):
        site.engine.may_answer = asyncio.Event()
        key = site.open()
        asking = asyncio.create_task(site.post(key))
        while not any(access.answers.num_in_progress for access in site.gateway._accesses.values()):
            await asyncio.sleep(0.01)
        site.gateway.revoke(key)
        is_error(await asking, 401)
        site.engine.may_answer.set()
        assert len(site.sessions[key].turns) == 0

    visit(test)


SECRETS = (
    *("/etc/passwd", "/v1/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/.env", "/v1", "/docs"),
    *("/v1/files/..%2f..%2fetc%2fpasswd", "/openapi.json", "/v1/chat/completions/../../../../etc/passwd"),
)


def test_a_trailing_slash_is_not_redirected(visit):
    async def test(site):
        root = site.gateway.base_url
        paths = ("/chat/completions/", "/responses/", "/messages/", "/messages/count_tokens/", "/chat/completions//")
        async with httpx.AsyncClient(trust_env=False) as client:
            for path in paths:
                for headers in ({}, {"Host": "evil.example"}, {"Authorization": f"Bearer {site.open()}"}):
                    response = await client.post(root + path, headers=headers, json={})
                    assert (response.status_code, response.headers.get("location")) == (404, None), path

    visit(test)


def test_other_hosts_paths_and_methods_are_refused(visit):
    async def test(site):
        key, root = site.open(), site.gateway.base_url.removesuffix("/v1")
        for host in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "[::2]", "", "a" * 300):
            is_error(await site.post(key, Host=host), 421)
        for host in ("localhost", f"127.0.0.1:{urlsplit(root).port}", "[::1]:80"):
            assert (await site.post(key, Host=host)).status_code == 200
        for path in SECRETS:
            is_error(await site.client.get(root + path, headers={"Authorization": f"Bearer {key}"}), 404)
            raw = await _raw(root, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert raw.startswith(b"HTTP/1.1 404") and b"root:" not in raw
        is_error(await site.client.get(f"{root}/v1{CHAT}", headers={"Authorization": f"Bearer {key}"}), 405)
        is_error(await site.client.delete(f"{root}/v1/models"), 405)

    visit(test)


HALF = {"role": "user", "content": "half \ud800"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
CALLING = {"role": "assistant", "tool_calls": [CALL], "content": [{"type": "tool_use"}]}
CHANGES = (
    *({"messages": value} for value in (None, 3, {}, [3], [None], [[]], [{}], [{"role": "user"}], [HALF], [CALLING])),
    *({"messages": [{"role": "user", "content": value}]} for value in (3, [3], [{}], [{"type": "x"}])),
    *({"stream": value} for value in (3, "yes", [])),
    *({"temperature": value} for value in ("hot", -1, 10**400, True, [])),
    *({"tools": value} for value in (3, [3], [{}], {"a": 1}, [{"type": "function"}], [{"name": ""}])),
    *({"max_tokens": value} for value in (0, -1, 1.5, "9")),
    {"constructor": 1, "__proto__": {"admin": True}},
    {"model": "half \ud800"},
    {"metadata": {"a": float("nan")}},
)
NAMES_IN_RESPONSES = {"messages": "input", "max_tokens": "max_output_tokens"}


def test_bodies_of_any_kind_get_an_error(visit):
    deep = b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    broken = [
        *(b"", b"x", b"null", b"[]", b"3", b'"text"', b"{", b"\xff\xfe{}", b"\x00", b"{}", deep, b"[" * 100_000),
        *(b'{"model": NaN}', b'{"model": 1' + b"0" * 5000 + b"}", b'{"model": "\\ud800"}'),
    ]

    async def test(site):
        key = site.open()
        for path in PATHS:
            names = NAMES_IN_RESPONSES if path == "/responses" else {}
            valid = {**BODY, "max_tokens": 9}
            for body in (*broken, *({**valid, **change} for change in CHANGES)):
                if isinstance(body, dict):
                    body = {names.get(name, name): value for name, value in body.items()}
                is_error(await site.post(key, path, body), 400, path)
        assert not site.sessions[key].turns and not site.engine.generations

    visit(test)


def test_large_and_slow_bodies_are_cut_off(visit, monkeypatch):
    async def test(site):
        key, root = site.open(), site.gateway.base_url.removesuffix("/v1")
        large = json.dumps({**BODY, "user": "x" * server_module.MAX_BODY}).encode()
        is_error(await site.post(key, body=large), 413)
        # without a key, the answer does not wait for the body
        start = f"POST /v1{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n"
        assert (await _raw(root, f"{start}\r\n".encode())).startswith(b"HTTP/1.1 401")
        monkeypatch.setattr(server_module, "BODY_SECONDS", 0.1)
        slow = f"{start}Authorization: Bearer {key}\r\n\r\n{{".encode()
        assert (await _raw(root, slow)).startswith(b"HTTP/1.1 408")
        for garbage in (b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST\r\n\r\n", b"\r\n" * 50 + b"x\r\n\r\n"):
            assert not (await _raw(root, garbage)).startswith(b"HTTP/1.1 2")

    visit(test)


def test_a_flood_is_bounded_per_key(visit, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_WAITING", 3)

    async def test(site):
        site.engine.may_answer = asyncio.Event()
        flooding, quiet = site.open(max_concurrent=4, max_turns=6), site.open()
        bodies = [{**BODY, "user": str(number)} for number in range(40)]
        flood = [asyncio.create_task(site.post(flooding, body=body)) for body in bodies]
        asking = asyncio.create_task(site.post(quiet))
        done, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 33:
            done, _ = await asyncio.wait(flood, timeout=0.01)
        site.engine.may_answer.set()
        statuses = sorted([(await response).status_code for response in flood])
        assert statuses == [200] * 6 + [403] + [429] * 33 and (await asking).status_code == 200
        more = await site.post(flooding, body={**BODY, "user": "more"})
        assert more.headers["x-should-retry"] == "false" and more.json()["error"]["code"] == "turn_limit_exceeded"
        assert len(site.sessions[flooding].turns) == 6

    visit(test)


def test_bodies_that_do_not_arrive_count_as_requests(visit):
    async def test(site):
        key, address = site.open(max_concurrent=2), urlsplit(site.gateway.base_url)
        head = (
            f"POST /v1{CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: 99\r\n\r\n{{"
        )
        writers = []
        for _ in range(2):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(head.encode())
            await writer.drain()
            writers.append(writer)
        (access,) = site.gateway._accesses.values()
        while not access.turnstile.locked():
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(site.post(key))
        while not access.num_waiting:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        for writer in writers:
            writer.close()
        assert (await waiting).status_code == 200


def test_a_request_that_waits_for_others_ends_with_its_episode(visit):
    async def test(site):
        site.engine.may_answer = asyncio.Event()
        key = site.open(max_concurrent=1)
        asking = [asyncio.create_task(site.post(key, body={**BODY, "user": user})) for user in "ab"]
        (access,) = site.gateway._accesses.values()
        while not access.num_waiting or not access.answers.num_in_progress:
            await asyncio.sleep(0.01)
        site.gateway.revoke(key)
        for request in asking:
            is_error(await request, 401)
        site.engine.may_answer.set()

    visit(test)


def test_connections_without_a_request_are_closed(visit, monkeypatch):
    monkeypatch.setattr("agent_r1.web.HEADER_SECONDS", 0.05)

    async def test(site):
        root = site.gateway.base_url
        for begun in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: lo"):
            assert await _raw(root, begun) == b""

    visit(test)


def test_later_requests_without_complete_headers_are_closed(visit, monkeypatch):
    async def test(site):
        address, key = urlsplit(site.gateway.base_url), site.open()
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"
        writer.write(head.encode())
        assert (await reader.read(4096)).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr("agent_r1.web.HEADER_SECONDS", 0.05)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n")
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()

    visit(test)


def test_idle_connections_leave_room_for_open_files(visit, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 16)

    async def test(site):
        address = urlsplit(site.gateway.base_url)
        idle = [await asyncio.open_connection(address.hostname, address.port) for _ in range(20)]
        closed = [asyncio.create_task(reader.read()) for reader, _ in idle]
        while sum(task.done() for task in closed) < 4:
            await asyncio.sleep(0.01)
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*closed)

    visit(test)


def test_the_limit_on_open_files_is_raised_for_connections_and_never_lowered(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        for max_connections, limit in ((100, 600), (200, 800)):
            monkeypatch.setattr(http_server, "MAX_CONNECTIONS", max_connections)
            assert http_server._max_connections() == max_connections
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard)
        monkeypatch.setattr(resource, "setrlimit", None)
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert http_server._max_connections() == 200
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _raw(root, content):
    """Send bytes and return the beginning of the response; b"" if the connection is closed without a response."""
    address = urlsplit(root)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, family=socket.AF_INET)
    try:
        writer.write(content)
        await writer.drain()
        async with asyncio.timeout(60):
            return await reader.read(4096)
    except ConnectionError:
        return b""
    finally:
        writer.close()

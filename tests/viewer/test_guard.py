"""The viewer answers only a browser with the token, only GET and local host names, always with strict headers."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import httpx
import pytest

from agent_r1.viewer.server import ViewerServer

PAGES = ("/", "/run/alba", "/run/alba/attempts", "/static/app.js", "/revision", "/nothing")


@pytest.fixture
def stranger(server: ViewerServer) -> httpx.Client:
    return httpx.Client(base_url=server.url.split("/?")[0])


def request(server: ViewerServer, text: str) -> str:
    """Send raw bytes, and return the first line of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(text.encode("latin-1"))
        return connection.makefile("rb").readline().decode("latin-1").strip()


@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_shown_without_the_token(stranger: httpx.Client, page: str) -> None:
    answer = stranger.get(page)
    assert answer.status_code == 403 and answer.text.count("\n") == 1 and "Alba" not in answer.text


@pytest.mark.parametrize("token", ["", "x", "%00", "%F0%9F%92%A9", "a" * 3000])
def test_a_wrong_token_is_refused(stranger: httpx.Client, server: ViewerServer, token: str) -> None:
    assert stranger.get(f"/?token={token}").status_code == 403
    cookie = {"Cookie": f"agent_r1_view_{server.port}={token}"}
    assert stranger.get("/", headers=cookie).status_code == 403


def test_the_token_becomes_a_cookie_that_scripts_and_embedding_pages_cannot_use(
    stranger: httpx.Client, server: ViewerServer
) -> None:
    answer = stranger.get(server.url)
    cookie = answer.headers["set-cookie"].lower()
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    assert "httponly" in cookie and "samesite=lax" in cookie and f"agent_r1_view_{server.port}=" in cookie
    assert stranger.get("/").status_code == 200


@pytest.mark.parametrize(
    "page", ["/run/alba", "/run/alba/attempts?status=completed&text=a%26b", "/run/alba/attempt/0.0.0%3Afilms%2F1"]
)
def test_the_token_is_accepted_at_each_page_and_leaves_its_address(
    stranger: httpx.Client, server: ViewerServer, page: str
) -> None:
    token = server.url.partition("?")[2]
    answer = stranger.get(f"{page}{'&' if '?' in page else '?'}{token}")
    assert (answer.status_code, answer.headers["location"]) == (303, page)
    assert stranger.get("/run/alba").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "//example.invalid/",
        "///example.invalid",
        "/\\example.invalid/",
        "/%2F/example.invalid/",
        "/%5Cexample.invalid/",
    ],
)
def test_a_token_redirects_to_no_other_host(server: ViewerServer, path: str) -> None:
    token = server.url.partition("?")[2]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"GET {path}?{token} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        answer = connection.makefile("rb").read().decode()
    location = re.search(r"(?m)^location: (\S*)\r$", answer)
    assert location is not None and re.fullmatch(r"/[^/\\].*", location[1]), answer


@pytest.mark.parametrize(
    "host", ["example.invalid", "127.0.0.1.example.invalid", "localhost:1@example.invalid", "[::1]", "", "0.0.0.0"]
)
def test_another_host_name_is_refused(client: httpx.Client, host: str) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 400


def test_a_tunnel_may_use_another_port(client: httpx.Client) -> None:
    assert client.get("/", headers={"Host": "localhost:9999"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_only_get_is_answered(client: httpx.Client, method: str) -> None:
    answer = client.request(method, "/")
    assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"


def test_a_body_is_refused_before_it_is_read(client: httpx.Client, server: ViewerServer) -> None:
    assert client.request("GET", "/", content=b"x").status_code == 413
    head = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    assert " 413 " in request(server, f"{head}Content-Length: 100000000000\r\n\r\n")
    assert " 413 " in request(server, f"{head}Transfer-Encoding: chunked\r\n\r\nfffffff\r\n")


def test_an_address_that_is_too_long_is_refused(client: httpx.Client, server: ViewerServer) -> None:
    assert client.get(f"/?text={'a' * 5000}").status_code == 414
    assert " 400 " in request(server, f"GET /{'a' * 200_000} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2f..%2fapp.py",
        "/static/%2e%2e/%2e%2e/app.py",
        "/static/....//app.py",
        "/static//etc/passwd",
        "/static/style.css%00.txt",
        "/run/../../../etc/passwd",
        "/run/..%2f..%2f..%2fetc%2fpasswd",
        "/run/alba%2f..%2fbruno",
        "/run/alba/attempt/../../../../etc/passwd",
        "/run/alba/group/../1",
        "/run/alba/run.db",
        "/run/.",
    ],
)
def test_no_other_file_can_be_reached(client: httpx.Client, server: ViewerServer, path: str) -> None:
    cookie = f"agent_r1_view_{server.port}={client.cookies[f'agent_r1_view_{server.port}']}"
    line = request(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n")
    assert " 404 " in line


@pytest.mark.parametrize("page", [*PAGES, "/?token=wrong"])
def test_every_answer_has_the_strict_headers(client: httpx.Client, stranger: httpx.Client, page: str) -> None:
    for answer in (client.get(page), stranger.get(page), client.post(page)):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_no_template_has_a_style_or_a_script_of_its_own() -> None:
    folder = Path(__file__).parents[2] / "agent_r1" / "viewer" / "templates"
    for template in folder.glob("*.html"):
        text = template.read_text("utf-8")
        assert not re.search(r"\s(on\w+|style)\s*=|<style|\| safe", text), template
        assert text.count("<script") == text.count('<script src="/static/app.js">')

"""Read the body of a request, with limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request


class RefusedBody(Exception):
    """Raised if the body of a request exceeds a limit. ``status`` is the HTTP status of the response."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return the body of a request.

    Raise RefusedBody if the body has more than ``max_bytes`` bytes, or does not arrive within ``seconds`` seconds.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise RefusedBody(413, f"send at most {max_bytes} bytes")
    except TimeoutError:
        raise RefusedBody(408, f"the body did not arrive within {seconds:g} s") from None
    return bytes(body)

"""HTTP to the servers of a run: hundreds of requests at once over kept connections.

On aiohttp: httpx looks through its whole pool of connections for every request, which is most of a driver's time when
a few hundred agents talk.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

__all__ = ["Http", "Lines", "Reply", "Unreachable"]


class Unreachable(Exception):
    """No answer: refused, broken off, or too late."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """ValueError when it is none."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Lines:
    """An answer that comes line by line."""

    status: int
    lines: AsyncIterator[bytes]

    async def text(self) -> str:
        """All that is left of it."""
        return b"".join([line async for line in self.lines]).decode("utf-8", "replace")


class Http:
    """A client of one server. `silence_s`: longest wait for the next bytes; `kept_s`: how long idle connections stay.

    `kept_s` must be less than what the server allows, or a request may meet a connection that is just being closed.
    """

    def __init__(self, base_url: str = "", *, silence_s: float = 600.0, connect_s: float = 10.0, kept_s: float = 4.0):
        self.base_url = base_url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=silence_s)
        self._kept_s = kept_s
        self._open: aiohttp.ClientSession | None = None
        self._closed = False

    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise Unreachable("this client is closed")
        if self._open is None:  # within the loop that will use it
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._kept_s)
            self._open = aiohttp.ClientSession(connector=connector, timeout=self._timeout, auto_decompress=True)
        return self._open

    async def get(self, path: str, *, limit_s: float | None = None) -> Reply:
        """A whole answer, whatever its status; Unreachable when there is none, or none within `limit_s`."""
        return await self._ask("GET", path, None, None, limit_s)

    async def post(
        self,
        path: str,
        body: Any,
        *,
        headers: Mapping[str, str] | None = None,
        limit_s: float | None = None,
        patient: bool = False,
    ) -> Reply:
        """The same, for a JSON body. `patient`: however long the server is silent."""
        return await self._ask("POST", path, body, headers, limit_s, patient=patient)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None,
        limit_s: float | None,
        *,
        patient: bool = False,
    ) -> Reply:
        options: dict[str, Any] = _json_body(body, headers) if method == "POST" else {}
        if limit_s is not None or patient:
            options["timeout"] = aiohttp.ClientTimeout(total=limit_s, sock_connect=self._timeout.sock_connect)
        try:
            async with self._session().request(method, self.base_url + path, **options) as reply:
                return Reply(reply.status, await reply.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{type(error).__name__} {error}") from error

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Any, *, headers: Mapping[str, str] | None = None) -> AsyncIterator[Lines]:
        """A JSON body's answer as it comes; Unreachable also when it breaks off."""
        try:
            async with self._session().post(self.base_url + path, **_json_body(body, headers)) as reply:
                yield Lines(reply.status, _lines(reply.content))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{type(error).__name__} {error}") from error

    @contextlib.asynccontextmanager
    async def forward(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[int, dict[str, str], AsyncIterator[bytes]]]:
        """Bytes as they are, and the answer's status, headers and bytes as they come."""
        try:
            async with self._session().request(
                method, self.base_url + path, data=body, headers=headers, skip_auto_headers=("User-Agent",)
            ) as reply:
                told = {name.lower(): value for name, value in reply.headers.items()}
                yield reply.status, told, reply.content.iter_any()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{type(error).__name__} {error}") from error

    async def close(self) -> None:
        """Close every connection; later requests are Unreachable."""
        self._closed = True
        session, self._open = self._open, None
        if session is not None:
            await session.close()


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _json_body(body: Any, headers: Mapping[str, str] | None) -> dict[str, Any]:
    return {"data": json.dumps(body).encode(), "headers": {"Content-Type": "application/json", **(headers or {})}}

"""The session server: one ASGI app in the rollout worker's event loop, private endpoints for episodes.

Routes, per session, nothing else: `/s/{id}/v1/chat/completions`, `/s/{id}/v1/models`, health probes;
the same under `/v1/…` when the API key names the session. No request reaches an engine's own paths.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from miles.config import Config
from miles.errors import ConfigError, MilesError, SessionError
from miles.rollout.engines.base import Engine
from miles.rollout.session import chat
from miles.rollout.session.rendering import Rendering, RenderingConfig
from miles.rollout.session.session import Completion, Session
from miles.types import Limits

__all__ = ["SessionConfig", "SessionServer"]

log = logging.getLogger(__name__)


class SessionConfig(Config):
    """The session server's address and limits."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(0, ge=0, le=65535)
    """Port; 0 takes a free one."""
    ttl_s: float = Field(3600.0, gt=0)
    """A session older than this answers nothing more."""
    max_body_mib: int = Field(64, gt=0)
    """Largest request body."""
    in_flight: int = Field(16, gt=0)
    """Most concurrent model calls of one session."""
    grace_s: float = Field(2.0, ge=0)
    """How long a generation goes on after its client went away."""
    keepalive_s: float = Field(3.0, gt=0)
    """Silence after which a streaming client gets a comment line."""
    rendering: RenderingConfig = RenderingConfig()
    """How conversations become tokens."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Signals belong to the run, not to its web server."""
        yield


class SessionServer:
    """Holds open sessions and serves them over HTTP. Use as an async context manager."""

    def __init__(
        self,
        engine: Engine,
        rendering: Rendering,
        config: SessionConfig | None = None,
        *,
        max_tokens: int = 1024,
    ) -> None:
        self.config = config or SessionConfig()
        self._engine, self._rendering, self._max_tokens = engine, rendering, max_tokens
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._ended: dict[str, float] = {}
        self._next_sweep = 0.0
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""
        chat_path, models_path = "/v1/chat/completions", "/v1/models"
        self.app = Starlette(
            routes=[
                Route(f"/s/{{session}}{chat_path}", self._chat, methods=["POST"]),
                Route(f"/s/{{session}}{models_path}", self._models),
                Route("/s/{session}", _healthy),
                Route(chat_path, self._chat, methods=["POST"]),
                Route(models_path, self._models),
                Route("/", _healthy),
                Route("/health", _healthy),
            ],
            exception_handlers={HTTPException: _http_error, MilesError: _miles_error, Exception: _bug},
        )

    async def __aenter__(self) -> "SessionServer":
        # The protocol must be named: asyncio sets TCP_NODELAY only then, and without it a reply waits 40 ms.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((self.config.host, self.config.port))
        except OSError as error:
            sock.close()
            raise ConfigError(
                f"cannot listen on {self.config.host}:{self.config.port} ({error.strerror}): "
                "another process has this port; set session.port=0 for a free one"
            ) from error
        self.url = f"http://{self.config.host}:{sock.getsockname()[1]}"
        settings = uvicorn.Config(self.app, log_level="warning", access_log=False, lifespan="off", backlog=4096)
        self._server = _Server(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for session in list(self._sessions.values()):
            await self.end(session)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._serving

    def open(self, limits: Limits | None = None) -> Session:
        """A new session with its own key."""
        self._forget_expired()
        session = Session(
            self._engine,
            self._rendering,
            limits=limits,
            max_tokens=self._max_tokens,
            grace_s=self.config.grace_s,
            ttl_s=max(self.config.ttl_s, 1.1 * limits.wall_s if limits else 0.0),
            in_flight=self.config.in_flight,
        )
        self._sessions[session.id] = session
        self._by_key[session.key] = session
        return session

    async def end(self, session: Session) -> None:
        """Close a session; late requests get a non-retryable 400."""
        self._sessions.pop(session.id, None)
        self._by_key.pop(session.key, None)
        self._ended[session.id] = self._ended[session.key] = session.expires
        await session.close()

    def base_url(self, session: Session) -> str:
        """What a client takes as its OpenAI base URL."""
        return f"{self.url}/s/{session.id}/v1"

    def _forget_expired(self) -> None:
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + 60.0
        self._ended = {name: until for name, until in self._ended.items() if until > now}

    def _find(self, request: Request) -> Session:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        key = bearer or request.headers.get("x-api-key", "")
        name = request.path_params.get("session")
        session = self._by_key.get(key) if name is None else self._sessions.get(name)
        if session is None:
            if key in self._ended or name in self._ended:
                raise SessionError("this session has ended; nothing more is sampled for it", code="session_ended")
            raise SessionError("unknown session or key", status=401, code="invalid_api_key")
        if not hmac.compare_digest(session.key.encode(), key.encode("utf-8", "replace")):
            raise SessionError("this key does not open this session", status=401, code="invalid_api_key")
        return session

    async def _models(self, request: Request) -> Response:
        self._find(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "miles"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        session = self._find(request)
        body = await self._json(request)
        asked = chat.parse(body)
        options = body.get("stream_options") or {}
        if not body.get("stream"):
            task = asyncio.create_task(session.complete(asked))
            done = await _unless_gone(request, task)
            done.delivered()
            return JSONResponse(chat.reply(done, asked.model))
        progress = _Progress()
        task = asyncio.create_task(session.complete(asked, progress.tokens))
        task.add_done_callback(lambda _: progress.event.set())
        await _first_sign(request, task, progress, self.config.keepalive_s)
        if task.done() and task.exception() is not None:
            await task
        stream = chat.ChatStream(asked.model, include_usage=bool(options.get("include_usage")))
        return StreamingResponse(
            self._events(stream, task, progress, list(asked.tools)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    async def _events(
        self,
        stream: chat.ChatStream,
        task: "asyncio.Task[Completion]",
        progress: "_Progress",
        tools: list[Any],
    ) -> AsyncIterator[bytes]:
        try:
            yield stream.start()
            next_parse = 0.0
            while not task.done():
                try:
                    await asyncio.wait_for(progress.event.wait(), self.config.keepalive_s)
                except TimeoutError:
                    yield b": keepalive\n\n"
                    continue
                progress.event.clear()
                began = time.monotonic()
                if not task.done() and progress.ids and began >= next_parse:
                    so_far = self._rendering.parse(list(progress.ids), tools, [], partial=True)
                    for event in stream.progress(so_far.content, so_far.reasoning):
                        yield event
                    next_parse = time.monotonic() + 20 * (time.monotonic() - began)  # parsing stays below 5 %
            try:
                done = await task
            except MilesError as error:
                yield stream.error(error)
                return
            events = list(stream.finish(done))
            for event in events[:-1]:
                yield event
            done.delivered()
            yield events[-1]
        finally:
            task.cancel()

    async def _json(self, request: Request) -> Any:
        limit = self.config.max_body_mib << 20
        if int(request.headers.get("content-length") or 0) > limit:
            raise SessionError(f"the body is larger than {self.config.max_body_mib} MiB", status=413, code="too_large")
        body = bytearray()
        async for piece in _pieces(request):
            body += piece
            if len(body) > limit:
                raise SessionError(
                    f"the body is larger than {self.config.max_body_mib} MiB", status=413, code="too_large"
                )
        try:
            return json.loads(body)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise SessionError(f"the body is not valid JSON: {error}") from error


class _Progress:
    """Tokens so far of a streaming generation."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.ids: tuple[int, ...] = ()

    def tokens(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self.event.set()


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise SessionError("the client went away", status=499, code="client_closed") from None


async def _gone(request: Request) -> None:
    """Return when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(request: Request, task: "asyncio.Task[Completion]") -> Completion:
    """Wait for the task; cancel it when the client disconnects first."""
    watcher = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise SessionError("the client went away", status=499, code="client_closed")
        return await task
    finally:
        watcher.cancel()
        task.cancel()


async def _first_sign(
    request: Request, task: "asyncio.Task[Completion]", progress: "_Progress", patience_s: float
) -> None:
    """Wait a little before the headers go out, so that quick failures still get their own HTTP status."""
    watcher, sign = asyncio.create_task(_gone(request)), asyncio.create_task(progress.event.wait())
    try:
        await asyncio.wait({watcher, sign}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if watcher.done() and not sign.done():
            task.cancel()
            raise SessionError("the client went away", status=499, code="client_closed")
    finally:
        watcher.cancel()
        sign.cancel()


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return await _miles_error(
        request, SessionError(f"{request.method} {request.url.path}: no such route", status=status)
    )


async def _miles_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MilesError)
    status, body, headers = chat.error_reply(error)
    return JSONResponse(body, status_code=status, headers=headers)


async def _bug(request: Request, error: Exception) -> Response:
    log.error("session server failed on %s", request.url.path, exc_info=error)
    return await _miles_error(request, MilesError("internal error; see the run's log"))

"""The session server: one ASGI app in the rollout worker's event loop, private endpoints for episodes.

Routes, per session, nothing else: `/s/{id}/v1/chat/completions`, `…/responses`, `…/messages`,
`…/messages/count_tokens`, `…/models`, health probes, and `/s/{id}/mcp`, the environment's tools; the same under
`/v1/…` when the API key names the session. No request reaches an engine's own paths.
"""

import asyncio
import contextlib
import hmac
import importlib
import json
import logging
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from miles.errors import MilesError, SessionError
from miles.rollout.engines.base import Engine
from miles.rollout.rendering.rendering import Rendering
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.dialects.base import Dialect, Stream, Wishes
from miles.rollout.session.dialects.chat import ChatDialect
from miles.rollout.session.dialects.messages import MessagesDialect
from miles.rollout.session.dialects.openapi import OPENAPI
from miles.rollout.session.dialects.responses import ResponsesDialect
from miles.rollout.session.session import ChatRequest, Completion, Flight, Model, Session
from miles.rollout.web import served
from miles.types import Limits

if TYPE_CHECKING:
    from miles.rollout.session.mcp import McpServer

__all__ = ["SessionConfig", "SessionServer"]

log = logging.getLogger(__name__)
CHAT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()


class SessionServer:
    """Holds open sessions and serves them over HTTP. Use as an async context manager."""

    def __init__(
        self,
        engine: Engine,
        rendering: Rendering,
        config: SessionConfig | None = None,
        *,
        max_tokens: int = 1024,
        others: Mapping[str, Model] | None = None,
    ) -> None:
        self._others = others
        self.config = config or SessionConfig()
        self._engine, self._rendering, self._max_tokens = engine, rendering, max_tokens
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._ended: dict[str, float] = {}
        self._next_sweep = 0.0
        self._serving = contextlib.AsyncExitStack()
        self._mcp_server: McpServer | None = None
        self.url = ""
        self.app = Starlette(
            routes=self._routes(),
            exception_handlers={HTTPException: _http_error, MilesError: _miles_error, Exception: _bug},
        )

    def _routes(self) -> list[Route]:
        """Every path below `/s/{session}` and alone, with `/v1` and without: clients join base URLs as they like."""
        posts: dict[str, Callable[..., Any]] = {
            "/chat/completions": partial(self._answer, CHAT),
            "/responses": partial(self._answer, RESPONSES),
            "/messages": partial(self._answer, MESSAGES),
            "/messages/count_tokens": self._count,
        }
        gets = {
            "/models": self._models,
            "/models/{model:path}": self._model,
            "/responses/{response}": self._stored,
        }
        routes = [Route(path, _healthy) for path in ("/", "/health", "/api/hello", "/s/{session}")]
        for path in ("/s/{session}/mcp", "/mcp"):
            routes.append(Route(path, self._mcp, methods=["GET", "POST", "DELETE"]))
        routes += [Route("/s/{session}/api/hello", _healthy), Route("/openapi.json", _describe)]
        for base in ("/s/{session}/v1", "/s/{session}", "/v1", ""):
            routes += [Route(base + path, answer, methods=["POST"]) for path, answer in posts.items()]
            routes += [Route(base + path, answer) for path, answer in gets.items()]
        return routes

    async def __aenter__(self) -> "SessionServer":
        self._server = await self._serving.enter_async_context(
            served(
                self.app,
                self.config.host,
                self.config.port,
                mend="set session.port=0 for a free one",
                timeout_keep_alive=int(self.config.ttl_s) + 1,  # agents' tools take minutes; their connections stay
            )
        )
        self.url = self._server.url
        return self

    async def __aexit__(self, *exc: object) -> None:
        for session in list(self._sessions.values()):
            await self.end(session)
        await self._serving.aclose()

    def open(
        self,
        limits: Limits | None = None,
        *,
        canonicalisers: Sequence[str] = (),
        ttl_s: float | None = None,
        **changes: Any,
    ) -> Session:
        """A new session with its own key. `canonicalisers` are the harness's, after those of the config, and `changes`
        what it needs to be otherwise in the config."""
        self._forget_expired()
        session = Session(
            self._engine,
            self._rendering,
            self.config.model_copy(update=changes),
            limits=limits,
            max_tokens=self._max_tokens,
            canonicalisers=canonicalisers,
            others=self._others,
            ttl_s=ttl_s,
        )
        self._sessions[session.id] = session
        self._by_key[session.key] = session
        return session

    async def end(self, session: Session) -> None:
        """Close a session; late requests get a non-retryable 400."""
        self._forget(session)
        await session.close()

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        self._by_key.pop(session.key, None)
        until = max(session.expires, time.monotonic()) + self.config.ttl_s
        self._ended[session.id] = self._ended[session.key] = until
        self._engine.release(session.id)

    def base_url(self, session: Session) -> str:
        """What a client takes as its OpenAI base URL; Anthropic's is the same without `/v1`."""
        return f"{self.url}/s/{session.id}/v1"

    def room(self, session: Session) -> tuple[int, int]:
        """(Tokens of prompt and answer, of an answer) that one call of the policy may have."""
        return session.context_of(self._engine), self._max_tokens

    def _forget_expired(self) -> None:
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + 60.0
        self._ended = {name: until for name, until in self._ended.items() if until > now}
        for session in [s for s in self._sessions.values() if s.expires < now]:
            self._forget(session)

    def _find(self, request: Request) -> Session:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        name = request.path_params.get("session")
        session = self._by_key.get(key) if name is None else self._sessions.get(name)
        if session is None:
            if key in self._ended or name in self._ended:
                raise SessionError("this session has ended; nothing more is sampled for it", code="session_ended")
            raise SessionError("unknown session or key", status=401, code="invalid_api_key")
        if not hmac.compare_digest(session.key.encode(), key.encode("utf-8", "replace")):
            raise SessionError("this key does not open this session", status=401, code="invalid_api_key")
        return session

    async def _mcp(self, request: Request) -> ASGIApp:
        """The tools of the session's environment; a session without any offers an empty list."""
        session = self._find(request)
        if self._mcp_server is None:  # the library takes a second to import, and few runs need it
            await asyncio.to_thread(importlib.import_module, "miles.rollout.session.mcp")
            from miles.rollout.session.mcp import McpServer

        if self._mcp_server is None:  # nor has another request been faster
            self._mcp_server = McpServer()
            self._serving.push_async_callback(self._mcp_server.close)
        return partial(self._mcp_server.answer, session.tools)

    async def _models(self, request: Request) -> Response:
        session = self._find(request)
        model = self._described("policy", session)
        return _json_reply(
            {"object": "list", "data": [model], "has_more": False, "first_id": "policy", "last_id": "policy"}
        )

    async def _model(self, request: Request) -> Response:
        return _json_reply(self._described(request.path_params["model"], self._find(request)))

    def _described(self, name: str, session: Session) -> dict[str, Any]:
        """A model in the words of both OpenAI and Anthropic; every name is the policy."""
        context = session.context_of(self._engine)
        words = {"id": name, "object": "model", "created": 0, "owned_by": "miles", "max_model_len": context}
        return {**words, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

    async def _count(self, request: Request) -> Response:
        session, body = self._find(request), await self._json(request)
        asked = _read(MESSAGES, body, request, Wishes(refuse=False))
        return _json_reply({"input_tokens": await session.count(asked)})

    async def _stored(self, request: Request) -> Response:
        session = self._find(request)
        done = session.answer_of(request.path_params["response"].removeprefix("resp_"))
        asked = ChatRequest(messages=(), model="policy")
        return _json_reply(RESPONSES.reply(done, asked, told_of_cut=session.config.report_truncation))

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        session, body = self._find(request), await self._json(request)
        try:
            asked = _read(dialect, body, request, Wishes(refuse=session.config.wishes == "refuse"))
        except SessionError as error:
            session.count_refusal(error.code)
            raise
        told = session.config.report_truncation
        with contextlib.ExitStack() as replying:
            replying.enter_context(session.replying())
            if not body.get("stream"):
                task = asyncio.create_task(session.complete(asked))
                task.add_done_callback(_seen)
                done = await _unless_gone(request, task)
                reply = _json_reply(dialect.reply(done, asked, told_of_cut=told))
                done.delivered()
                return reply
            progress = _Progress()
            task = asyncio.create_task(session.complete(asked, progress.update))
            task.add_done_callback(_seen)
            task.add_done_callback(lambda _: progress.event.set())
            await _first_sign(request, task, progress, self.config.keepalive_s)
            if task.done() and task.exception() is not None:
                await task
            until_sent = replying.pop_all()
        return StreamingResponse(
            self._events(
                until_sent, dialect.stream(asked, body, request.headers, told_of_cut=told), task, progress, asked
            ),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    async def _events(
        self,
        until_sent: contextlib.ExitStack,
        stream: Stream,
        task: "asyncio.Task[Completion]",
        progress: "_Progress",
        asked: ChatRequest,
    ) -> AsyncIterator[bytes]:
        with until_sent:
            async for event in self._told(stream, task, progress, asked):
                yield event

    async def _told(
        self, stream: Stream, task: "asyncio.Task[Completion]", progress: "_Progress", asked: ChatRequest
    ) -> AsyncIterator[bytes]:
        started, next_parse = False, 0.0
        tools = list(asked.tools) if asked.may_call else []
        try:
            while not task.done():
                flight = progress.flight
                if flight is not None and not started:
                    started = True
                    for event in stream.start(flight.token, flight.prompt_tokens or 0):
                        yield event
                try:
                    await asyncio.wait_for(progress.event.wait(), self.config.keepalive_s)
                except TimeoutError:
                    yield stream.keepalive
                    continue
                progress.event.clear()
                began = time.monotonic()
                may_show = flight is not None and flight.rendering.streams and bool(flight.ids)
                if flight is not None and may_show and not task.done() and began >= next_parse:
                    so_far = flight.rendering.parse(list(flight.ids), tools, list(flight.tail), partial=True)
                    for event in stream.progress(so_far.content, so_far.reasoning):
                        yield event
                    next_parse = time.monotonic() + 20 * (time.monotonic() - began)  # parsing stays below 5 %
            try:
                done = await task
            except MilesError as error:
                yield stream.error(error)
                return
            except Exception as error:  # the client must learn that its stream has failed
                log.error("a model call failed", exc_info=error)
                yield stream.error(MilesError("internal error; see the run's log"))
                return
            events = [*([] if started else stream.start(done.token, done.prompt_tokens)), *stream.finish(done)]
            for event in events[:-1]:
                yield event
            done.delivered()
            yield events[-1]
        finally:
            task.cancel()

    async def _json(self, request: Request) -> dict[str, Any]:
        limit = self.config.max_body_mib << 20
        if _length(request) > limit:
            raise _too_large(limit)
        body = bytearray()
        async for piece in _pieces(request):
            body += piece
            if len(body) > limit:
                raise _too_large(limit)
        try:
            data = json.loads(_unpacked(bytes(body), request.headers.get("content-encoding", ""), limit))
        except (ValueError, RecursionError) as error:
            raise SessionError(f"the body is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise SessionError("the body must be a JSON object")
        return data


def _read(dialect: Dialect, body: dict[str, Any], request: Request, wishes: Wishes) -> ChatRequest:
    """A body in the session's words; whatever is odd about it is the client's to mend."""
    try:
        return dialect.parse(body, request.headers, wishes)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise SessionError(f"the body cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def _length(request: Request) -> int:
    told = request.headers.get("content-length", "0")
    return int(told) if told.isdecimal() else 0


def _too_large(limit: int) -> SessionError:
    return SessionError(f"the body is larger than {limit >> 20} MiB", status=413, code="too_large")


def _unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    """A body without its content encoding; never more than `limit` bytes of it."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise SessionError(f"content-encoding {encoding!r} is not supported; send gzip, deflate or plain", status=415)
    try:
        unpacker = zlib.decompressobj(wbits=47 if encoding == "gzip" else 15)
        unpacked = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise SessionError(f"the body is not valid {encoding}: {error}") from error
    if len(unpacked) > limit:
        raise _too_large(limit)
    return unpacked


class _Progress:
    """The flight that a streaming client waits for, once it is known."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.flight: Flight | None = None

    def update(self, flight: Flight) -> None:
        self.flight = flight
        if flight.ids:
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


def _seen(task: "asyncio.Task[Completion]") -> None:
    """A client that has gone leaves nobody to hear how its call ended."""
    if not task.cancelled():
        task.exception()


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
    return _json_reply({"status": "ok"})


async def _describe(request: Request) -> Response:
    return _json_reply(OPENAPI)


def _json_reply(data: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII: halves of surrogate pairs, which UTF-8 cannot hold, survive as escapes."""
    text = json.dumps(data, separators=(",", ":"))
    return Response(text, status_code=status, headers=headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return await _miles_error(
        request, SessionError(f"{request.method} {request.url.path}: no such route", status=status)
    )


async def _miles_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MilesError)
    dialect: Dialect = MESSAGES if "/messages" in request.url.path else CHAT
    status, body, headers = dialect.error_reply(error)
    return _json_reply(body, status, headers)


async def _bug(request: Request, error: Exception) -> Response:
    log.error("session server failed on %s", request.url.path, exc_info=error)
    return await _miles_error(request, MilesError("internal error; see the run's log"))

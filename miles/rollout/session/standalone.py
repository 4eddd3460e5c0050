"""The session server by itself: open, use and close sessions over HTTP, in front of any SGLang server.

    POST   /sessions           {"turns": 64, …limits}  -> {"id", "api_key", "base_url", "anthropic_base_url"}
    GET    /sessions/{id}      -> numbers about the session so far
    DELETE /sessions/{id}      {"reward": 1.0, "meta": {…}} -> the trajectory, also appended to the output file

All three need the admin key as a bearer token. Sessions that nobody closes are closed and kept at the end.
"""

import contextlib
import hmac
import json
import math
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from miles.config import Config
from miles.errors import ConfigError, SessionError
from miles.rollout.engines.sglang.client import SGLangClient
from miles.rollout.rendering.families import load_rendering
from miles.rollout.rendering.rendering import Rendering, RenderingConfig
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.server import SessionServer
from miles.rollout.session.session import Session
from miles.trajectories import Trajectory
from miles.types import Limits

__all__ = ["Service", "StandaloneConfig", "standalone"]


class StandaloneConfig(Config):
    """`miles session serve`."""

    engine: str
    """Base URL of the SGLang server."""
    model: Path
    """Model directory with the tokenizer that the engine serves."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8800, ge=0, le=65535)
    """Port; 0 takes a free one."""
    output: Path = Path("trajectories.jsonl")
    """Where closed sessions are appended."""
    admin_key: str = ""
    """Opens and closes sessions; made up when empty."""
    family: str = "auto"
    """A renderers family, or template."""
    thinking: bool = False
    """Whether the model thinks before it answers."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of every session."""
    max_tokens: int = Field(4096, gt=0)
    """New tokens of one model call at most."""


class _Opening(Config):
    """Limits of one session."""

    turns: int = Field(256, gt=0)
    """Model calls."""
    tokens: int = Field(1 << 20, gt=0)
    """Sampled tokens of all calls."""
    wall_s: float = Field(3600.0, gt=0)
    """Seconds until the session answers nothing more."""
    context: int | None = Field(None, gt=0)
    """Tokens of prompt and answer of one call."""
    canonicalisers: tuple[str, ...] = ()
    """Changes to requests before tokenising."""


@dataclass(slots=True)
class Service:
    """A running recorder."""

    server: SessionServer
    output: Path
    admin_key: str
    open: dict[str, Session] = field(default_factory=dict)
    """Sessions that are not written yet, also those that answer nothing more."""

    @property
    def url(self) -> str:
        return self.server.url

    def routes(self) -> list[Route]:
        return [
            Route("/sessions", self._open, methods=["POST"]),
            Route("/sessions/{session}", self._report, methods=["GET"]),
            Route("/sessions/{session}", self._close, methods=["DELETE"]),
        ]

    async def _open(self, request: Request) -> Response:
        self._check(request)
        try:
            asked = _Opening.model_validate(await _body(request))
        except ValidationError as error:
            raise SessionError(f"limits: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
        limits = Limits(turns=asked.turns, tokens=asked.tokens, wall_s=asked.wall_s, context=asked.context)
        try:
            session = self.server.open(limits, canonicalisers=asked.canonicalisers, ttl_s=asked.wall_s)
        except ConfigError as error:
            raise SessionError(str(error)) from error
        self.open[session.id] = session
        base = self.server.base_url(session)
        return _json(
            {
                "id": session.id,
                "api_key": session.key,
                "base_url": base,
                "anthropic_base_url": base.removesuffix("/v1"),
            },
            201,
        )

    async def _report(self, request: Request) -> Response:
        return _json(self._find(request).report())

    async def _close(self, request: Request) -> Response:
        session, told = self._find(request), await _body(request)
        reward, meta = told.get("reward"), told.get("meta") or {}
        if reward is not None and not _is_number(reward):
            raise SessionError("reward must be a finite number")
        try:
            json.dumps(meta, allow_nan=False)
        except ValueError as error:
            raise SessionError(f"meta cannot be kept as JSON: {error}") from error
        if not isinstance(meta, dict):
            raise SessionError("meta must be an object")
        line = await self._keep(session, reward, meta)
        return Response(line, media_type="application/json")

    async def _keep(self, session: Session, reward: float | None, meta: dict[str, Any]) -> str:
        self.open.pop(session.id, None)
        await self.server.end(session)
        line = Trajectory(id=session.id, tree=session.tree(), reward=reward, meta=meta).to_line()
        with self.output.open("a") as lines:
            lines.write(line + "\n")
        return line

    async def close(self) -> None:
        """Keep what nobody closed."""
        for session in list(self.open.values()):
            if session.turns:
                await self._keep(session, None, {"outcome": "unclosed"})

    def _find(self, request: Request) -> Session:
        self._check(request)
        session = self.open.get(request.path_params["session"])
        if session is None:
            raise SessionError("no open session with this id", status=404, code="not_found")
        return session

    def _check(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.admin_key.encode()):
            raise SessionError("this needs the admin key as a bearer token", status=401, code="invalid_api_key")


@contextlib.asynccontextmanager
async def standalone(config: StandaloneConfig) -> AsyncIterator[Service]:
    """Start everything; ConfigError says what is missing."""
    rendering = load_rendering(config.model, RenderingConfig(family=config.family, thinking=config.thinking))
    _fits(config.model, rendering)
    engine = SGLangClient(config.engine, temperature=config.temperature, follow=True)
    try:
        await engine.start()
        settings = SessionConfig(host=config.host, port=config.port)
        server = SessionServer(engine, rendering, settings, max_tokens=config.max_tokens)
        service = Service(server, config.output, config.admin_key or secrets.token_urlsafe(24))
        server.app.router.routes.extend(service.routes())
        async with server:
            try:
                yield service
            finally:
                await service.close()
    finally:
        await engine.close()


def _fits(model: Path, rendering: Rendering) -> None:
    """ConfigError when the tokenizer has ids that the model has not: one such id kills an SGLang server."""
    path = model / "config.json"
    size = json.loads(path.read_text()).get("vocab_size") if path.is_file() else None
    if size is not None and len(rendering.tokenizer) > size:
        raise ConfigError(
            f"{model}: the tokenizer has {len(rendering.tokenizer)} tokens and the model {size}: they do not fit"
        )


async def _body(request: Request) -> dict[str, Any]:
    raw = await request.body()
    try:
        data = json.loads(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        raise SessionError(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise SessionError("the body must be a JSON object")
    return data


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _json(data: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(data), status_code=status, media_type="application/json")

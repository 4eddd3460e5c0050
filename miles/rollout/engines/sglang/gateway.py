"""One address for a fleet of servers: bytes go through as they are, sessions stay on their server, updates reach all.

A stock router parses bodies and drops the fields that it does not know (recorded routing, input ids), and passes no
updates on. This one reads a body only to see how much of a cache it needs. A session is what the header
`x-miles-session` (or `x-smg-routing-key`, as stock routers call it) says; requests without one are spread.
"""

import asyncio
import contextlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from miles.errors import EngineLost, MilesError
from miles.http import Http, Unreachable
from miles.rollout.engines.sglang.client import SGLangClient
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.fleet import Fleet, Member, first_ranks

__all__ = ["Gateway"]

GENERATE = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
WHOLE = ("/update_weights_from_disk",)
BESIDE = ("/load_lora_adapter", "/unload_lora_adapter", "/update_weight_version")
PARTS = ("/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc")
PASSING = (
    "/begin_weight_update",
    "/end_weight_update",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/flush_cache",
)
_Begun = tuple[contextlib.AsyncExitStack, int, dict[str, str], AsyncIterator[bytes]]
_SESSION = ("x-miles-session", "x-smg-routing-key")
_NOT_PASSED = {"host", "connection", "keep-alive", "content-length", "transfer-encoding", "date", "server", *_SESSION}


class Gateway:
    """An ASGI app, `app`, and the fleet behind it. A server that comes back is told the updates that the others had."""

    def __init__(self, config: SGLangConfig, *, python: Path, arguments: list[str], log_dir: Path) -> None:
        self.fleet = Fleet(config, _client, self._prepare, python=python, arguments=arguments, log_dir=log_dir)
        self._config = config
        self._http = Http(silence_s=config.timeout_s)
        self._updates: list[tuple[str, bytes]] = []
        self._whole = True  # whether those updates are all of it
        self.counts: Counter[str] = Counter()
        everywhere = [Route(path, self._everywhere, methods=["POST"]) for path in (*WHOLE, *BESIDE, *PARTS, *PASSING)]
        self.app = Starlette(
            routes=[
                *(Route(path, self._generate, methods=["POST"]) for path in GENERATE),
                *everywhere,
                Route("/workers", self._workers, methods=["GET", "POST"]),
                Route("/workers/drain", self._drain, methods=["POST"]),
                Route("/workers/{name:path}", self._remove, methods=["DELETE"]),
                Route("/metrics", self._metrics),
                Route("/{path:path}", self._any, methods=["GET", "POST"]),
            ],
            exception_handlers={MilesError: _told},
        )

    async def close(self) -> None:
        await self.fleet.close()
        await self._http.close()

    async def _generate(self, request: Request) -> Response:
        """To the session's server; another one's while nothing of an answer was sent. A client that goes is let go."""
        body = await request.body()
        work = asyncio.ensure_future(self._begun(request, body))
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)
            stack, status, told, pieces = await work
            return StreamingResponse(self._through(stack, pieces), status_code=status, headers=_passed(told))
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def _begun(self, request: Request, body: bytes) -> _Begun:
        """An answer whose first byte is there, and what to close after its last."""
        named = next((request.headers[name] for name in _SESSION if name in request.headers), None)
        session = named or secrets.token_hex(8)
        self.counts["requests"] += 1
        for _ in range(len(self.fleet.members) + 1):
            async with contextlib.AsyncExitStack() as stack:
                if named is None:
                    stack.callback(self.fleet.placement.release, session)
                tokens = _tokens(body, self._config.reserve)
                seat = await stack.enter_async_context(
                    self.fleet.placement.seat(session, tokens, limit_s=self._config.start_s)
                )
                member = self.fleet.members[seat.server]
                client, headers = member.client, _passed(request.headers)
                if member.client is None or not member.up:
                    continue
                if member.facts.copies > 1:  # the one thing that is added: which copy has the session's cache
                    headers["x-data-parallel-rank"] = str(seat.copy)
                    body = _steered(body, seat.copy) if request.url.path == "/generate" else body
                try:
                    status, told, pieces = await stack.enter_async_context(
                        self._http.forward("POST", member.url + _path(request), body, headers)
                    )
                except Unreachable:
                    self.counts["moved"] += 1
                    await self.fleet.trouble(member, client)
                    continue
                return stack.pop_all(), status, told, pieces
        raise EngineLost("no server answered; send the request again")

    async def _through(self, stack: contextlib.AsyncExitStack, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async with stack:
            async for piece in pieces:
                yield piece

    async def _everywhere(self, request: Request) -> Response:
        """An update, to all servers at once; 502 with every answer when one refused.

        A server that waits for weights hears of whole updates only. One that did not answer is given up: it is told
        what the others took when it comes back.
        """
        path, body = _path(request), await request.body()
        async with self.fleet.loading:
            members = [member for member in self.fleet.taking() if member.up or path in WHOLE]
            clients = [member.client for member in members]
            bodies = _group_places(members, body) if path == "/init_weights_update_group" else [body] * len(members)
            asked = (self._ask(member, path, part) for member, part in zip(members, bodies, strict=True))
            replies = await asyncio.gather(*asked)
            taken = [reply for reply in replies if reply[0] == 200]
            if taken:
                self._remember(path, body)
            refused: dict[str, Any] = {}
            for member, client, (status, told) in zip(members, clients, replies, strict=True):
                if status != 200:
                    refused[member.name] = [status, told.decode(errors="replace")]
                    await self.fleet.lost_unless_serving(member, client)
                elif path in WHOLE and member.state == "waiting":
                    self.fleet.join(member)
        if refused or not taken:
            return JSONResponse({"success": False, "servers": refused or "none is there"}, status_code=502)
        return Response(taken[0][1], media_type="application/json")

    def _remember(self, path: str, body: bytes) -> None:
        """What a server that comes back must be told."""
        if path in WHOLE:
            self._updates, self._whole = [(path, body)], True
        elif path in BESIDE:
            self._updates = [*(self._updates if path != "/unload_lora_adapter" else _without(self._updates, body))]
            if path != "/unload_lora_adapter":
                self._updates.append((path, body))
        elif path in PARTS:
            self._whole = False

    async def _prepare(self, member: Member) -> bool:
        if not self._whole:
            return False
        for path, body in self._updates:
            status, told = await self._ask(member, path, body)
            if status != 200:
                raise EngineLost(f"{member.name} refused {path}: {told[:300]!r}")
        return True

    async def _ask(self, member: Member, path: str, body: bytes) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"}
        try:
            async with self._http.forward("POST", member.url + path, body, headers) as (status, _, pieces):
                return status, b"".join([piece async for piece in pieces])
        except Unreachable as error:
            return 503, str(error).encode()

    async def _any(self, request: Request) -> Response:
        """What every server knows alike: its model, its health."""
        for member in [member for member in self.fleet.members.values() if member.up]:
            headers, body = _passed(request.headers), await request.body()
            try:
                async with self._http.forward(request.method, member.url + _path(request), body, headers) as reply:
                    status, told, pieces = reply
                    data = b"".join([piece async for piece in pieces])
                    return Response(data, status_code=status, headers=_passed(told))
            except Unreachable:
                await self.fleet.lost_unless_serving(member, member.client)
        raise EngineLost("no server is up; see GET /workers")

    async def _workers(self, request: Request) -> Response:
        if request.method == "POST":
            await self.fleet.add(str((await request.json())["url"]).rstrip("/"))
        seats = list(self.fleet.placement.seats())
        rows = [
            {
                "name": member.name,
                "url": member.url,
                "state": member.state,
                "deaths": member.deaths,
                "seats": [
                    {"copy": s.copy, "requests": s.requests, "used": s.used, "held": s.held, "tokens": s.tokens}
                    for s in seats
                    if s.server == member.name
                ],
            }
            for member in self.fleet.members.values()
        ]
        return JSONResponse({"workers": rows, "waiting": self.fleet.placement.waiting})

    async def _drain(self, request: Request) -> Response:
        self.fleet.placement.drain(str((await request.json())["name"]))
        return JSONResponse({"success": True})

    async def _remove(self, request: Request) -> Response:
        try:
            await self.fleet.remove(request.path_params["name"])
        except KeyError as error:
            return JSONResponse({"success": False, "message": f"no server {error}"}, status_code=404)
        return JSONResponse({"success": True})

    async def _metrics(self, request: Request) -> Response:
        """In Prometheus' text format."""
        lines = [f"miles_gateway_{name}_total {count}" for name, count in {**self.counts, **self.fleet.counts}.items()]
        lines.append(f"miles_gateway_waiting {self.fleet.placement.waiting}")
        for seat in self.fleet.placement.seats():
            label = f'{{server="{seat.server}",copy="{seat.copy}"}}'
            lines.append(f"miles_gateway_load{label} {seat.load:.6f}")
            lines.append(f"miles_gateway_requests{label} {seat.requests}")
        return PlainTextResponse("\n".join(lines) + "\n")


def _client(url: str) -> SGLangClient:
    """Whoever uses the gateway updates the weights: any version is right."""
    return SGLangClient(url, follow=True)


def _path(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def _passed(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED}


async def _gone(request: Request) -> None:
    """Return when the client has disconnected; its body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _steered(body: bytes, copy: int) -> bytes:
    """`/generate` takes the copy of the model from its body alone."""
    with contextlib.suppress(ValueError, TypeError):
        return json.dumps({"routed_dp_rank": copy, **json.loads(body)}).encode()
    return body


def _tokens(body: bytes, reserve: float) -> int:
    """Tokens of cache that a request may need: exact where the ids are given, else guessed from its length."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        data = json.loads(body)
        answer = int((data.get("sampling_params") or data).get("max_new_tokens") or data.get("max_tokens") or 256)
        ids = data.get("input_ids")
        return (len(ids) if isinstance(ids, list) else len(body) // 4) + int(reserve * answer)
    return len(body) // 4 + 256


def _group_places(members: list[Member], body: bytes) -> list[bytes]:
    """Each server's own ranks in a process group."""
    data = json.loads(body)
    places = first_ranks(members, int(data.get("rank_offset", 1)))
    return [json.dumps({**data, "rank_offset": place}).encode() for place in places]


def _without(updates: list[tuple[str, bytes]], body: bytes) -> list[tuple[str, bytes]]:
    name = json.loads(body).get("lora_name")
    return [(path, told) for path, told in updates if json.loads(told).get("lora_name") != name]


def _told(request: Request, error: Exception) -> Response:
    """A failure of ours, as something to try again or not."""
    status = 503 if getattr(error, "retryable", False) else 400
    return JSONResponse({"error": {"message": str(error), "code": status}}, status_code=status)

import asyncio
import contextlib
import json

import httpx
import pytest

from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.rendering.families import load_rendering
from miles.rollout.rendering.rendering import RenderingConfig
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.server import SessionServer


@pytest.fixture
def engine_of(rendering):
    """A scripted engine that speaks the tiny model's tokens."""

    def make(script, **settings):
        return ScriptedEngine(script, encode=rendering.encode, stop_token=rendering.stop_ids[0], **settings)

    return make


@pytest.fixture
def serve(rendering):
    """A session server around an engine; use as `async with serve(engine) as server`."""

    def make(engine, **settings):
        return SessionServer(engine, rendering, SessionConfig(**{"grace_s": 0.05, **settings}), max_tokens=256)

    return make


@pytest.fixture(scope="session")
def thinking(model):
    """The tiny model as one that thinks, and whose thoughts stay in its context."""
    return load_rendering(model, RenderingConfig(thinking=True, keep_thinking="always"))


class Client:
    """One harness against one session: literal bodies in, status and JSON or events out."""

    def __init__(self, http, server, session, engine):
        self.http, self.server, self.session, self.engine = http, server, session, engine

    async def post(self, path, body, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self.server.url}/s/{self.session.id}/v1/{path}"
        return await self.http.post(url, json=body, headers={"x-api-key": self.session.key, **named})

    async def chat(self, messages, *, tools=(), headers=None, **more):
        body = {"model": "m", "messages": messages, **({"tools": list(tools)} if tools else {}), **more}
        reply = await self.post("chat/completions", body, **(headers or {}))
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]

    async def messages(self, messages, *, headers=None, **more):
        body = {"model": "m", "max_tokens": 32000, "messages": messages, **more}
        reply = await self.post("messages?beta=true", body, **(headers or {}))
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def responses(self, items, *, headers=None, **more):
        reply = await self.post("responses", {"model": "m", "input": items, **more}, **(headers or {}))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def tree(self):
        return self.session.tree()

    def shape(self):
        """(parent, edge) of each turn, as a client's story reads."""
        return [(turn.parent, turn.edge.value) for turn in self.tree().turns]

    def exact(self):
        """Check that every prompt that the engine saw is what the tree says, and that outputs are what it sampled."""
        tree = self.tree()
        asked = {request.id: list(request.prompt_ids) for request in self.engine.requests}
        for record, turn in zip(self.session.recorder.records.all, tree.turns, strict=True):
            above = [i for t in tree.path(turn.id)[:-1] for i in (*t.prompt_ids, *t.output_ids)]
            assert [*above, *turn.prompt_ids] == asked[record.token]
            assert len(turn.output_ids) == len(turn.logprobs) == len(turn.versions)
        return tree


@pytest.fixture
def client_of(thinking):
    """`async with client_of(script) as client`: a thinking model behind a real server."""

    @contextlib.asynccontextmanager
    async def make(script, *, limits=None, names=(), latency_s=0.0, context_length=1 << 20, **settings):
        engine = ScriptedEngine(
            script,
            encode=thinking.encode,
            stop_token=thinking.stop_ids[0],
            latency_s=latency_s,
            context_length=context_length,
        )
        config = SessionConfig(**{"grace_s": 0.05, **settings})
        async with SessionServer(engine, thinking, config, max_tokens=512) as server, httpx.AsyncClient() as http:
            yield Client(http, server, server.open(limits, canonicalisers=names), engine)

    return make


async def until(holds):
    """Wait for something that is about to happen; how long depends on the machine."""
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen in ten seconds")


def events(text):
    """(event name, data) of each server-sent event; comments left out."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        name = next((line[7:] for line in lines if line.startswith("event: ")), "")
        data = next((line[6:] for line in lines if line.startswith("data: ")), None)
        if data is not None:
            found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found

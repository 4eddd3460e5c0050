"""What the session server adds to a turn: the same scripted engine, asked directly and through HTTP, in one run.

    python benchmarks/session_server.py [--turns 4] [--sessions 200]

The raw client runs in the same process as the server, so its own cost is part of what is shown.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.envs.vault import VaultTaskset
from miles.recipes.tiny_model import TinyModelConfig, make_tiny_model
from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.rendering.families import load_rendering
from miles.rollout.rendering.rendering import Rendering
from miles.rollout.session.server import SessionServer
from miles.sandboxes.shell import SHELL_TOOL
from miles.types import GenerateRequest, Message

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "cat amber"}}\n</tool_call>'


class RawClient:
    """Keep-alive HTTP/1.1 over one socket, nothing more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, path: str, key: str, body: Mapping[str, object]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        header = await self._reader.readuntil(b"\r\n\r\n")
        length = int(header.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        reply: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        return reply


def scripted(rendering: Rendering) -> ScriptedEngine:
    """An engine that calls the tool for ever, at once."""
    ids = [*rendering.encode(CALL), rendering.stop_ids[0]]
    return ScriptedEngine(lambda request: ids)


async def direct(rendering: Rendering, sessions: int, turns: int, concurrency: int) -> list[float]:
    """Seconds of each engine call without a server."""
    engine, times, slots = scripted(rendering), [], asyncio.Semaphore(concurrency)
    prompt = rendering.full([{"role": "user", "content": "open amber"}], [SHELL_TOOL])

    async def one(session: int) -> None:
        async with slots:
            for turn in range(turns):
                request = GenerateRequest(id=f"{turn}", session=str(session), prompt_ids=prompt, max_tokens=64)
                began = time.perf_counter()
                await engine.generate(request)
                times.append(time.perf_counter() - began)

    await asyncio.gather(*(one(n) for n in range(sessions)))
    return times


async def served(rendering: Rendering, sessions: int, turns: int, concurrency: int) -> list[float]:
    """Seconds of each turn of a growing conversation through the server."""
    times: list[float] = []
    clients: asyncio.Queue[RawClient] = asyncio.Queue()
    async with SessionServer(scripted(rendering), rendering, max_tokens=64) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(concurrency):
            clients.put_nowait(RawClient(*await asyncio.open_connection(host, int(port), limit=1 << 24)))

        async def one() -> None:
            client, session = await clients.get(), server.open()
            messages: list[Message] = [{"role": "user", "content": "open amber"}]
            for _ in range(turns):
                body = {"model": "m", "messages": messages, "tools": [SHELL_TOOL]}
                began = time.perf_counter()
                reply = await client.post(f"/s/{session.id}/v1/chat/completions", session.key, body)
                times.append(time.perf_counter() - began)
                message = reply["choices"][0]["message"]
                call = message["tool_calls"][0]["id"]
                messages += [message, {"role": "tool", "tool_call_id": call, "content": "see birch"}]
            await server.end(session)
            clients.put_nowait(client)

        await asyncio.gather(*(one() for _ in range(sessions)))
        while not clients.empty():
            clients.get_nowait()._writer.close()
    return times


def percentile(times: list[float], share: float) -> float:
    return 1000 * sorted(times)[min(len(times) - 1, int(share * len(times)))]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--sessions", type=int, default=400)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        taskset = VaultTaskset()
        demos = list(itertools.islice(taskset.demonstrations(0), 64))
        messages, tools = max(demos, key=lambda demo: len(demo[0]))
        words = taskset.vocabulary()
        make_tiny_model(Path(folder), TinyModelConfig(), seed=0, words=words, tools=tools, example=messages)
        rendering = load_rendering(Path(folder))
    print(f"{asked.sessions} sessions x {asked.turns} turns, tool call and tool result each turn")
    print(f"{'open':>5} {'direct p50':>11} {'served p50':>11} {'added p50':>10} {'served p99':>11} {'turns/s':>8}")
    for concurrency in (1, 16, 64):
        plain = asyncio.run(direct(rendering, asked.sessions, asked.turns, concurrency))
        began = time.perf_counter()
        through = asyncio.run(served(rendering, asked.sessions, asked.turns, concurrency))
        rate = len(through) / (time.perf_counter() - began)
        p50, base = 1000 * statistics.median(through), 1000 * statistics.median(plain)
        cells = f"{base:9.3f}ms {p50:9.3f}ms {p50 - base:8.3f}ms {percentile(through, 0.99):9.3f}ms {rate:8.0f}"
        print(f"{concurrency:5} {cells}")


if __name__ == "__main__":
    main()

"""What the session server adds: the same scripted engine, asked directly and through HTTP, in one run.

    python benchmarks/session_server.py [--turns 4] [--open 1 64 1000] [--history 100000] [--model DIR]

The raw client runs in the same process as the server, so its own cost is part of what is shown. `--model` takes a
real tokenizer; without it the tiny model's is used.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.envs.vault import VaultTaskset
from miles.recipes.tiny_model import TinyModelConfig, make_tiny_model
from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.rendering.families import load_rendering
from miles.rollout.rendering.rendering import Rendering
from miles.rollout.session.server import SessionServer
from miles.rollout.session.session import ChatRequest, Session
from miles.sandboxes.shell import SHELL_TOOL
from miles.trainer.data.rows import tree_rows
from miles.types import GenerateRequest, Limits, Message

CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "0", "type": "function", "function": {"name": "shell", "arguments": {"command": "ls"}}}],
}
USER: Message = {"role": "user", "content": "open amber"}
MANY = Limits(turns=1 << 20, tokens=1 << 40, wall_s=3600)


class RawClient:
    """Keep-alive HTTP/1.1 over one socket, nothing more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, server: SessionServer) -> "RawClient":
        host, port = server.url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 24))

    async def post(self, session: Session, body: Mapping[str, object]) -> tuple[float, dict[str, Any]]:
        """(Seconds from the first byte sent to the last one read, the assistant's message)."""
        data = json.dumps(body).encode()
        head = (
            f"POST /s/{session.id}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {session.key}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + data)
        header = await self._reader.readuntil(b"\r\n\r\n")
        length = int(header.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        reply = await self._reader.readexactly(length)
        taken = time.perf_counter() - began
        message: dict[str, Any] = json.loads(reply)["choices"][0]["message"]
        return taken, message

    def close(self) -> None:
        self._writer.close()


def scripted(rendering: Rendering) -> ScriptedEngine:
    """An engine that calls the tool for ever, at once."""
    ids = rendering.sampled_for([USER], CALL, [SHELL_TOOL])
    return ScriptedEngine(lambda request: ids)


def followed(messages: Sequence[Message], answer: Message, text: str) -> list[Message]:
    call = answer["tool_calls"][0]["id"]
    return [*messages, answer, {"role": "tool", "tool_call_id": call, "content": text}]


async def direct(rendering: Rendering, calls: int) -> list[float]:
    """Seconds of each engine call without a server."""
    engine, times = scripted(rendering), []
    prompt = rendering.full([USER], [SHELL_TOOL])
    for turn in range(calls):
        request = GenerateRequest(id=f"{turn}", session="0", prompt_ids=prompt, max_tokens=64)
        began = time.perf_counter()
        await engine.generate(request)
        times.append(time.perf_counter() - began)
    return times


async def served(
    rendering: Rendering, sessions: int, turns: int, open_at_once: int, rate: float | None = None
) -> list[float]:
    """Seconds of each turn of growing conversations, `open_at_once` of them at a time.

    With `rate` the agents think between turns, so that all of them together ask so often a second.
    """
    times: list[float] = []
    chance = random.Random(0)
    async with SessionServer(scripted(rendering), rendering, max_tokens=64) as server:
        slots: asyncio.Queue[RawClient] = asyncio.Queue()
        for _ in range(open_at_once):
            slots.put_nowait(await RawClient.to(server))

        async def one() -> None:
            client, session, messages = await slots.get(), server.open(MANY), [USER]
            for _ in range(turns):
                if rate is not None:
                    await asyncio.sleep(chance.uniform(0, 2 * open_at_once / rate))
                body = {"model": "m", "messages": messages, "tools": [SHELL_TOOL]}
                taken, answer = await client.post(session, body)
                times.append(taken)
                messages = followed(messages, answer, "see birch")
            await server.end(session)
            slots.put_nowait(client)

        await asyncio.gather(*(one() for _ in range(sessions)))
        while not slots.empty():
            slots.get_nowait().close()
    return times


async def histories(rendering: Rendering, history: int, text: str, step: int) -> tuple[list[float], list[float]]:
    """(Seconds of turns that add `step` tokens to nothing, and to a history of `history` tokens)."""
    fresh: list[float] = []
    late: list[float] = []
    async with SessionServer(scripted(rendering), rendering, max_tokens=64) as server:
        client, old = await RawClient.to(server), server.open(MANY)
        messages: list[Message] = [USER]
        for turn in range(history // step + 20):
            body = {"model": "m", "messages": messages, "tools": [SHELL_TOOL]}
            taken, answer = await client.post(old, body)
            messages = followed(messages, answer, f"{turn} {text}")
            if turn < history // step:
                continue
            late.append(taken)
            young = server.open(MANY)  # measured beside each other, turn by turn
            alone = {"model": "m", "messages": [{"role": "user", "content": f"{turn} {text}"}], "tools": [SHELL_TOOL]}
            fresh.append((await client.post(young, alone))[0])
            await server.end(young)
        client.close()
    return fresh, late


async def memory(rendering: Rendering, text: str, turns: int) -> tuple[float, float, int, int]:
    """(Bytes a token kept, seconds to make rows of the tree, turns, tokens)."""
    session, messages = Session(scripted(rendering), rendering, limits=MANY, max_tokens=64), [USER]
    for turn in range(turns):
        done = await session.complete(ChatRequest(messages=tuple(messages), tools=(SHELL_TOOL,)))
        done.delivered()
        messages = followed(messages, done.message, f"{turn} {text}")
    records = session.recorder.records
    tokens = sum(len(record.prompt) + len(record.output) for record in records.all)
    tree = await session.close()
    began = time.perf_counter()
    rows = tree_rows(tree)
    taken = time.perf_counter() - began
    assert len(rows) == 1
    return records.bytes / tokens, taken, turns, tokens


def percentile(times: list[float], share: float) -> float:
    return 1000 * sorted(times)[min(len(times) - 1, int(share * len(times)))]


def tiny_rendering(folder: Path) -> Rendering:
    taskset = VaultTaskset()
    demos = list(itertools.islice(taskset.demonstrations(0), 64))
    messages, tools = max(demos, key=lambda demo: len(demo[0]))
    make_tiny_model(folder, TinyModelConfig(), seed=0, words=taskset.vocabulary(), tools=tools, example=messages)
    return load_rendering(folder)


def text_of_tokens(rendering: Rendering, count: int) -> str:
    """English-looking text of about `count` tokens."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "opens",
        "an",
        "amber",
        "vault",
        "and",
        "reads",
        "what",
        "birch",
        "told",
        "him",
        "about",
        "the",
        "key",
    ]
    each = len(rendering.encode(" ".join(words))) / len(words)
    return " ".join(itertools.islice(itertools.cycle(words), int(count / each)))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--sessions", type=int, default=400)
    options.add_argument("--open", type=int, nargs="+", default=[1, 64, 1000])
    options.add_argument("--rate", type=float, default=200.0, help="turns a second, all sessions together")
    options.add_argument("--history", type=int, default=100_000)
    options.add_argument("--model", type=Path, help="a directory with a real tokenizer")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendering = load_rendering(asked.model) if asked.model else tiny_rendering(Path(folder))
    print(f"family {rendering.family}; {asked.turns} turns a session, a tool call and its result each turn")
    base = 1000 * statistics.median(asyncio.run(direct(rendering, 400)))
    print(f"{'open':>5} {'direct p50':>11} {'added p50':>10} {'added p99':>10}   at {asked.rate:g} turns/s in all")
    for open_at_once in asked.open:
        through = asyncio.run(served(rendering, max(32, open_at_once), asked.turns, open_at_once, asked.rate))
        p50, p99 = 1000 * statistics.median(through) - base, percentile(through, 0.99) - base
        print(f"{open_at_once:5} {base:9.3f}ms {p50:8.3f}ms {p99:8.3f}ms")
    began = time.perf_counter()
    turns = len(asyncio.run(served(rendering, asked.sessions, asked.turns, 16)))
    print(f"as fast as it goes, 16 open: {turns / (time.perf_counter() - began):.0f} turns/s on one core")
    text = text_of_tokens(rendering, 1000)
    fresh, late = asyncio.run(histories(rendering, asked.history, text, 1000))
    new, old = 1000 * statistics.median(fresh), 1000 * statistics.median(late)
    print(f"a turn of 1,000 new tokens: {new:.2f} ms alone, {old:.2f} ms after {asked.history:,}: {old / new:.2f}x")
    each, taken, count, tokens = asyncio.run(memory(rendering, text_of_tokens(rendering, 100), 1000))
    print(f"memory: {each:.1f} bytes a token kept; rows of {count} turns, {tokens:,} tokens: {1000 * taken:.1f} ms")


if __name__ == "__main__":
    main()

"""What a model call costs the driver's event loop, by HTTP client, with many agents at once: CPU time, in one run.

    python -m benchmarks.http_clients [--agents 128] [--calls 20]

A server in another process answers a chat completion after 50 ms. Each client asks it from all agents at once.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import httpx

from miles.http import Http

SERVER = """
import asyncio, json, sys, uvicorn
REPLY = json.dumps({"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [{"index": 0,
    "finish_reason": "stop", "message": {"role": "assistant", "content": "answer 42"}}]}).encode()
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(0.05)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REPLY)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": REPLY})
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", lifespan="off")
"""
MESSAGES = [{"role": "user", "content": "open amber"}] + [
    {"role": "assistant", "content": "let me look"},
    {"role": "user", "content": "see birch"},
] * 4
BODY = {"model": "policy", "messages": MESSAGES}
Call = Callable[[], Awaitable[object]]


async def cpu_ms(call: Call, agents: int, calls: int) -> float:
    """Milliseconds of this process's CPU for each call."""

    async def agent() -> None:
        for _ in range(calls):
            await call()

    await asyncio.gather(*(call() for _ in range(agents)))  # connections
    began = time.process_time()
    await asyncio.gather(*(agent() for _ in range(agents)))
    return 1000 * (time.process_time() - began) / (agents * calls)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=128)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--port", type=int, default=18423)
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}"
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(options.port)])  # noqa: ASYNC220
    ours = Http(url, kept_s=60.0)
    try:
        from openai import AsyncOpenAI

        plain = httpx.AsyncClient(
            base_url=url, limits=httpx.Limits(max_connections=None, max_keepalive_connections=256)
        )
        sdk = AsyncOpenAI(base_url=url, api_key="none")
        async with asyncio.timeout(20):
            while True:
                try:
                    await plain.post("/chat/completions", content=json.dumps(BODY))
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
        clients: dict[str, Call] = {
            "miles.http (aiohttp)": lambda: ours.post("/chat/completions", BODY),
            "httpx": lambda: plain.post("/chat/completions", json=BODY),
            "OpenAI's SDK": lambda: sdk.chat.completions.create(**BODY),  # type: ignore[call-overload]
        }
        found = {name: await cpu_ms(call, options.agents, options.calls) for name, call in clients.items()}
        first = next(iter(found.values()))
        for name, ms in found.items():
            print(f"{name:22} {ms:6.2f} ms of CPU a call, {ms / first:.1f}x  ({options.agents} agents at once)")
        await plain.aclose()
        await sdk.close()
    finally:
        await ours.close()
        server.kill()
        server.wait()


if __name__ == "__main__":
    asyncio.run(main())

"""Servers that run without a run of Miles: launched, looked after and reached at one address until they are stopped.

`miles engine start` makes this process and waits for it; its state lies in a file, so that others find it. Whatever
ends it, its servers end with it.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.errors import ConfigError
from miles.places import miles_home
from miles.processes import owner_tag, process_tag
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.gateway import Gateway
from miles.rollout.engines.sglang.install import default_python
from miles.rollout.engines.sglang.process import has_gpu, server_arguments
from miles.rollout.web import served

__all__ = ["alive", "keep", "refuse_taken", "state_file", "states", "stop"]


def state_file(name: str) -> Path:
    """Where a keeper of that name writes what it is."""
    return miles_home() / "servers" / f"{name}.json"


def states() -> Iterator[dict[str, Any]]:
    """What every keeper wrote, those of dead ones included."""
    for path in sorted((miles_home() / "servers").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(path.read_text())


def alive(state: dict[str, Any]) -> bool:
    """Whether the keeper that wrote it lives."""
    try:
        pid = int(str(state["tag"]).partition("-")[0])
        dead = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return not dead and process_tag(pid) == str(state["tag"])
    except (FileNotFoundError, ProcessLookupError, ValueError, LookupError):
        return False


def stop(name: str, *, limit_s: float = 30.0) -> bool:
    """End a keeper and its servers; False when there was none. ConfigError for an unknown name."""
    path = state_file(name)
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        known = ", ".join(str(found["name"]) for found in states()) or "none"
        raise ConfigError(f"no servers are called {name!r}; there are: {known}") from error
    lived = alive(state)
    pid, until = int(str(state["tag"]).partition("-")[0]), time.monotonic() + limit_s
    for number in (signal.SIGTERM, signal.SIGKILL):
        if alive(state):
            os.kill(pid, number)
        while alive(state) and time.monotonic() < until:
            time.sleep(0.1)
        until = time.monotonic() + 5.0
    path.unlink(missing_ok=True)
    return lived


async def keep(name: str, model: Path, config: SGLangConfig, *, host: str, port: int, log_dir: Path) -> None:
    """Launch, look after, serve at one address; return on SIGTERM or SIGINT with everything ended."""
    state: dict[str, Any] = {"name": name, "tag": owner_tag(), "model": str(model), "log": str(log_dir), "url": ""}
    if not config.urls:
        python = config.python or default_python()
        arguments = server_arguments(config, model, gpu=has_gpu())
    else:
        python, arguments = Path(), []
    with _claimed(name, state):
        gateway = Gateway(config, python=python, arguments=arguments, log_dir=log_dir)
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        coming = asyncio.ensure_future(gateway.fleet.start())
        try:
            await asyncio.wait({coming, ending := asyncio.ensure_future(stopped.wait())}, return_when="FIRST_COMPLETED")
            if not stopped.is_set():
                await coming
                async with served(gateway.app, host, port, mend="choose another --port") as server:
                    _write(name, {**state, "url": server.url})
                    if host not in ("127.0.0.1", "localhost", "::1"):
                        print(
                            f"whoever reaches {host} can use and change these servers: nobody asks for a key",
                            flush=True,
                        )
                    print(f"{len(gateway.fleet.members)} servers of {model} at {server.url}", flush=True)
                    await stopped.wait()
            ending.cancel()
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            await gateway.close()


def refuse_taken(name: str) -> None:
    """ConfigError when servers of that name run."""
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(state_file(name).read_text())
        if alive(before):
            where = before["url"] or "they are starting"
            raise ConfigError(f"servers called {name!r} run already ({where}): stop them, or choose another --name")


@contextlib.contextmanager
def _claimed(name: str, state: dict[str, Any]) -> Iterator[None]:
    """The name is ours until the end of the block."""
    path = state_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_taken(name)
    _write(name, state)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _write(name: str, state: dict[str, Any]) -> None:
    partial = state_file(name).with_suffix(".partial")
    partial.write_text(json.dumps(state))
    partial.replace(state_file(name))

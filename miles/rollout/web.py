"""A web app of ours on a port, in the event loop of whoever serves it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from miles.errors import ConfigError

__all__ = ["WebServer", "served"]


class WebServer(uvicorn.Server):
    """Runs while its app is served at `url`."""

    url = ""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Signals belong to the program, not to its web server."""
        yield


@contextlib.asynccontextmanager
async def served(app: Any, host: str, port: int, *, mend: str, **settings: Any) -> AsyncIterator[WebServer]:
    """The server of an app, from when it answers; it is gone after the block. Port 0 is a free one.

    ConfigError when the port is taken: `mend` says what the user can do. `settings` are uvicorn's.
    """
    # The protocol must be named: asyncio sets TCP_NODELAY only then, and without it a reply waits 40 ms.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}): another process has this port; {mend}"
        ) from error
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", backlog=4096, **settings)
    server = WebServer(config)
    server.url = f"http://{host}:{sock.getsockname()[1]}"
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started:
            if serving.done():
                await serving
            await asyncio.sleep(0.005)
        yield server
    finally:
        server.should_exit = server.force_exit = True
        await serving

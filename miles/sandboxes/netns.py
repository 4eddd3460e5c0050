"""A port inside a network namespace, served from outside: nothing is needed in the image.

A socket stays in the namespace where it was made, whoever holds it; so a process that enters the namespace makes it and
hands it over.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence

from miles.errors import SandboxError
from miles.sandboxes.base import Connect

__all__ = ["serve_inside"]

_MAKE = """
import socket, sys
made = socket.socket()
made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
made.bind(("127.0.0.1", int(sys.argv[1])))
made.listen(128)
socket.send_fds(socket.socket(fileno=int(sys.argv[2])), [b"x"], [made.fileno()])
"""
_CHUNK = 1 << 16


async def serve_inside(
    enter: Sequence[str], connect: Connect, port: int, pass_fds: Sequence[int] = ()
) -> tuple[asyncio.Server, int]:
    """Carry every connection to a port of the namespace that the command line `enter` enters; the server and the port.

    SandboxError when it cannot be entered, or the port is taken.
    """
    made = await asyncio.to_thread(_make, enter, port, pass_fds)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await connect()
        except OSError:
            writer.close()
            return
        try:
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            back.close()
            writer.close()

    return await asyncio.start_server(carry, sock=made), int(made.getsockname()[1])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _make(enter: Sequence[str], port: int, pass_fds: Sequence[int]) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [*enter, sys.executable, "-I", "-c", _MAKE, str(port), str(theirs.fileno())]
        done = subprocess.run(
            command, capture_output=True, pass_fds=(*pass_fds, theirs.fileno()), timeout=30, check=False
        )
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip().splitlines()
            raise SandboxError(f"no port can be opened inside the sandbox: {words[-1] if words else done.returncode}")
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=fds[0])

"""A sandbox over any provider: what one can carry bytes to and from, and end, is all that a provider has to say.

Commands, files and connections go through one long-lived process inside (`guest`). Where an image has no Python, each
command is a process of the provider's own: slower, without streams.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from miles.errors import SandboxError, SandboxLost
from miles.sandboxes.base import Connect, ExecResult, Image, Process, SandboxSpec
from miles.sandboxes.children import check_timeout
from miles.sandboxes.inside.channel import Channel, ChannelLost, Pipe
from miles.sandboxes.inside.guest import GUEST
from miles.sandboxes.inside.native import END_ALL

__all__ = ["Machine", "MachineSandbox"]

_START = 'command -v python3 > /dev/null && exec python3 -I -S -c "$@"; exec python -I -S -c "$@"'  # no process but one
_RECEIVE = "import os,marshal;d=b'';exec('while len(d)<{0}:d+=os.read(0,{0}-len(d)) or os._exit(0)');"
_SOURCE, _CODE = "exec(compile(d,'miles','exec'))", "exec(marshal.loads(d))"
"""What the process inside begins with: it reads its program, since everybody there sees its arguments."""
_NO_PYTHON = "command -v python3 || command -v python || echo none"
_LISTENINGS = 40  # of a twentieth of a second
_OPENINGS = 5  # how often a way in is tried while commands end whatever they can
_READ = 'test -f "$1" && head -c "$2" -- "$1"'
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && { ! test -e "$1" || test -f "$1"; } && cat > "$1"'


class Machine(Protocol):
    """One provider's live machine."""

    text: bool
    """Whether a pipe carries only text."""
    has_workdir: bool
    """Whether it begins with the spec's work directory."""

    env: Mapping[str, str]
    """Variables of its image that a process inside does not have by itself."""
    python: str
    """Where its Python is; empty: to be looked for."""
    native_first: int
    """Commands that are cheaper without the process inside than starting that would be."""
    code: bytes
    """The program compiled for that very Python; empty: it compiles it itself."""

    @property
    def id(self) -> str: ...

    async def open(self, argv: Sequence[str]) -> Pipe:
        """Start a process inside that stays. SandboxLost."""
        ...

    async def run(self, argv: Sequence[str], **settings: Any) -> ExecResult:
        """A command without the process inside; settings as `Channel.run`'s."""
        ...

    async def alive(self) -> bool: ...

    async def end_all(self) -> bool:
        """End every process of commands from outside; False where only the inside can."""
        ...

    def oom_kills(self) -> int | None:
        """How often the kernel killed for memory; None where only the inside can tell."""
        ...

    async def listen(self, connect: Connect, port: int) -> tuple[asyncio.Server, int] | None:
        """A server of this process on a port inside; None where that is impossible."""
        ...

    async def keepalive(self, ttl_s: float) -> None: ...

    async def snapshot(self) -> Image: ...

    async def destroy(self) -> None: ...


class MachineSandbox:
    """One machine as a `Sandbox`. Call `start` first."""

    def __init__(self, machine: Machine, spec: SandboxSpec) -> None:
        self._machine, self._spec = machine, spec
        self._channel: Channel | None = None
        self._native = False
        self._done_natively = 0
        self._opening = asyncio.Lock()
        self._spare: list[list[int]] = []
        self._inside: list[int] = []
        """The present process inside: its pid and when it started."""
        self._reached: dict[int, Connect] = {}
        self._servers: list[asyncio.Server] = []
        self._destroyed = self._ended = False

    @property
    def id(self) -> str:
        return self._machine.id

    async def start(self, files: Mapping[str, bytes]) -> None:
        """Open the way in and write `files`; nothing is left when that fails."""
        try:
            if not self._machine.native_first:
                await self._open()
            if not self._machine.has_workdir:
                await self.exec(["mkdir", "-p", self._spec.workdir], cwd="/")
            for path, data in files.items():
                await self.write(path, data)
        except BaseException:
            await asyncio.shield(self.destroy())
            raise

    async def _open(self) -> Channel | None:
        """The channel that is open, or a new one; None where the image has no Python."""
        async with self._opening:
            if self._destroyed:
                raise SandboxLost(f"sandbox {self.id} is gone; the episode starts again in a fresh one")
            if self._native or (self._channel is not None and not self._channel.lost.is_set()):
                return self._channel
            await self._hang_up()
            await self._reopen()
            return self._channel

    async def _way_in(self) -> Channel | None:
        """For one command or file: the channel when it is open already or will pay, None for the machine's own way."""
        first = self._done_natively < self._machine.native_first and self._channel is None
        if first and not self._reached and not self._destroyed:
            self._done_natively += 1
            return None
        return await self._open()

    async def _reopen(self, *, listen: bool = True) -> list[list[int]]:
        """Open a channel, or find that there can be none; the processes that ran before it. SandboxLost. With `listen`
        the ports inside are opened again: not while an older process may have them."""
        for tries in range(1, _OPENINGS + 1):
            try:
                channel, found = await self._new_channel()
            except ChannelLost as error:
                if not await self._machine.alive():
                    raise SandboxLost(f"sandbox {self.id} is gone; the episode starts again in a fresh one") from error
                if not self._spare and await self._has_no_python():
                    self._native = True
                    return []
                if tries == _OPENINGS:
                    raise
                await self._machine.end_all()
            else:
                self._channel = channel
                if listen:
                    await self._listen_again(channel)
                return found
        raise AssertionError("the loop returns or raises")

    async def _has_no_python(self) -> bool:
        found = await self._machine.run(["/bin/sh", "-c", _NO_PYTHON], timeout_s=20.0)
        return found.stdout.strip() == b"none"

    async def _new_channel(self) -> tuple[Channel, list[list[int]]]:
        arguments = ["text"] if self._machine.text else []
        program = self._machine.code or GUEST.encode()
        words = [_RECEIVE.format(len(program)) + (_CODE if self._machine.code else _SOURCE), *arguments]
        known = self._machine.python
        start = [known, "-I", "-S", "-c"] if known else ["/bin/sh", "-c", _START, "sh"]
        pipe = await self._machine.open([*start, *words])
        channel = Channel(pipe, text=self._machine.text)
        try:
            await channel.send_program(program)
            told = await channel.start()
        except BaseException:
            await asyncio.shield(channel.close())
            raise
        found = [list(one) for one in told.get("processes", ())]
        self._inside = next((one for one in found if one[0] == told.get("pid")), [])
        others = [one for one in found if one != self._inside]
        self._spare = self._spare or others
        stopped = [list(one) for one in told.get("stopped", ())]
        return channel, [one for one in others if one not in stopped]

    async def _listen_again(self, channel: Channel) -> None:
        for port, connect in self._reached.items():
            for tries in range(1, _LISTENINGS + 1):
                try:
                    await channel.listen(port, connect)
                    break
                except OSError:  # an older process is just letting go of it
                    if tries == _LISTENINGS:
                        raise
                    await asyncio.sleep(0.05)

    async def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def adopt(self, spec: SandboxSpec) -> None:
        """Take over another spec's files and variables: this machine was made ahead for its kind."""
        self._spec = spec
        for path, data in spec.files.items():
            await self.write(path, data)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output: int = 1 << 20,
    ) -> ExecResult:
        check_timeout(timeout_s)
        settings = {**self._settings(cwd, env), "timeout_s": timeout_s, "stdin": stdin, "max_output": max_output}
        channel = await self._way_in()
        before, inside = self._machine.oom_kills(), self._inside
        if channel is None:
            return await self._machine.run(_argv(command), **settings)
        try:
            result = await channel.run(_argv(command), **settings)
        except ChannelLost as error:
            await self._after_loss(channel, inside, error)
            result = _killed()
        after = self._machine.oom_kills()
        if before is not None and after is not None and after > before and result.outcome in ("signal", "exited"):
            return replace(result, outcome="oom") if result.exit_code != 0 else result
        return result

    async def _after_loss(self, channel: Channel, inside: list[int], error: ChannelLost) -> None:
        """Return when the process inside was ended by a command, which is the command's doing. SandboxLost when the
        machine is gone, or when that process lives on and only the way to it broke."""
        async with self._opening:
            if self._channel is not channel:
                return  # another caller has seen to it
            self._channel = None
            try:
                lives = inside in await self._reopen(listen=False)
                with contextlib.suppress(SandboxLost):
                    await self._silence()
            finally:
                await asyncio.shield(channel.close())
            if lives:
                raise SandboxLost(f"sandbox {self.id} does not answer: {error}") from error

    async def spawn(
        self, command: str | Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        return await (await self._streams()).spawn(_argv(command), **self._settings(cwd, env))

    async def read(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        channel = await self._way_in()
        if channel is not None:
            try:
                return await channel.get(path, max_bytes)
            except OSError as error:
                raise FileNotFoundError(f"{path}: {error.strerror}") from error
        argv = ["/bin/sh", "-c", _READ, "sh", path, str(max_bytes + 1)]
        result = await self._machine.run(argv, timeout_s=60.0, max_output=2 * max_bytes + 4)
        if result.exit_code != 0:
            raise FileNotFoundError(path)
        if len(result.stdout) > max_bytes:
            raise ValueError(f"{path} is larger than {max_bytes} bytes")
        return result.stdout

    async def write(self, path: str, data: bytes) -> None:
        channel = await self._way_in()
        if channel is not None:
            try:
                await channel.put(path, data)
            except OSError as error:
                raise OSError(error.errno, f"cannot write {path} in the sandbox: {error.strerror}") from error
            return
        result = await self._machine.run(["/bin/sh", "-c", _WRITE, "sh", path], stdin=data, timeout_s=60.0)
        if result.exit_code != 0:
            raise OSError(f"cannot write {path} in the sandbox: {result.text.strip()}")

    async def forward(self, port: int) -> int:
        await self._streams()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await (await self._streams()).dial(port, reader, writer)
            except (OSError, SandboxError):
                writer.close()

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def reach(self, connect: Connect, port: int = 0) -> int:
        channel = await self._open()
        if channel is not None:
            port = await channel.listen(port, connect)
            self._reached[port] = connect
            return port
        found = await self._machine.listen(connect, port)
        if found is None:
            raise SandboxError(
                f"sandbox {self.id} has no python3, and no way to its network from outside: choose an image with Python"
            )
        self._servers.append(found[0])
        return found[1]

    async def keepalive(self, ttl_s: float) -> None:
        await self._machine.keepalive(ttl_s)

    async def snapshot(self) -> Image:
        return await self._machine.snapshot()

    async def quiesce(self) -> None:
        """What answers afterwards was started afterwards: a command cannot have tampered with it."""
        if not await self._machine.alive():
            raise SandboxLost(f"sandbox {self.id} is gone; the episode starts again in a fresh one")
        async with self._opening:
            await self._silence()

    async def _silence(self) -> None:
        """End everything and begin anew."""
        if await self._machine.end_all():
            await self._hang_up()
            return
        if self._native:
            await self._machine.run(["/bin/sh", "-c", END_ALL], timeout_s=60.0)
            return
        if self._channel is not None:  # makes room for a new process, where there is none left
            with contextlib.suppress(SandboxLost):
                await self._channel.silence(self._spare, 5.0)
        for tries in range(1, _OPENINGS + 1):
            old, self._channel = self._channel, None
            try:
                await self._reopen(listen=False)
                assert self._channel is not None
                await self._channel.silence(self._spare)
                await self._listen_again(self._channel)
            except ChannelLost:
                if tries == _OPENINGS:
                    raise
            else:
                return
            finally:
                if old is not None:
                    await asyncio.shield(old.close())

    async def destroy(self) -> None:
        if self._ended:
            return
        self._destroyed = True
        for server in self._servers:
            server.close()
        try:
            await self._machine.destroy()
            self._ended = True
        finally:
            with contextlib.suppress(SandboxError):
                await self._hang_up()

    async def _streams(self) -> Channel:
        channel = await self._open()
        if channel is None:
            raise SandboxError(f"sandbox {self.id} has no python3, which streams and ports need: choose another image")
        return channel

    def _settings(self, cwd: str | None, env: Mapping[str, str] | None) -> dict[str, Any]:
        folder = cwd or self._spec.workdir  # programs believe PWD, and what leads in has this host's
        told = {**self._machine.env, **self._spec.env, "PWD": folder, **(env or {})}
        return {"cwd": folder, "env": told, "user": self._spec.user or None}


def _argv(command: str | Sequence[str]) -> list[str]:
    return ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)


def _killed() -> ExecResult:
    """Of a command that ended the process which looked after it."""
    words = b"the command ended every process of the sandbox\n"
    return ExecResult(exit_code=None, stdout=b"", stderr=words, outcome="signal", truncated=False, duration_s=0.0)

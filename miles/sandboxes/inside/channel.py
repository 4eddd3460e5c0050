"""The host's side of a sandbox's one long-lived process: commands, files and connections over one stream of bytes.

A command through it costs about a millisecond, wherever the provider is; a process per command costs a hundred in
Docker. Providers need to carry bytes both ways, nothing else; `guest/main.py` says what the frames are.
"""

import asyncio
import base64
import contextlib
import errno
import itertools
import json
import logging
import marshal
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from signal import SIGKILL
from typing import Any, Protocol

from miles.errors import SandboxError, SandboxLost
from miles.sandboxes.base import Connect, ExecResult

__all__ = ["Channel", "ChannelLost", "ChannelProcess", "Pipe"]

log = logging.getLogger(__name__)
_HEADER = struct.Struct(">IBI")
_CHUNK = 1 << 16
_WINDOW = 1 << 20
_GRACE_S = 10.0  # what a guest gets beyond a command's own timeout


class ChannelLost(SandboxLost):
    """The process inside has ended, or does not answer; the machine may still be there."""


class Pipe(Protocol):
    """Bytes to and from a process inside."""

    async def read(self) -> bytes:
        """What has come; empty at the end."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


class _Stream:
    """What arrives for one number: (kind, payload), and the room for what is sent."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self.on_its_way = 0
        self.room = asyncio.Event()
        self.room.set()
        self.over = False


class Channel:
    """Open with `start`. Every method raises ChannelLost when the process inside is gone."""

    def __init__(self, pipe: Pipe, *, text: bool = False) -> None:
        self._pipe, self._text = pipe, text
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._listeners: dict[int, Connect] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing = asyncio.Lock()
        self._hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reading: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()

    async def send_program(self, program: bytes) -> None:
        """What the process inside shall run, before anything else."""
        try:
            await self._pipe.write(program)
        except (OSError, SandboxError):  # it has ended: `start` says so
            log.debug("the process inside ended before it had its program")

    async def start(self, limit_s: float = 30.0) -> dict[str, Any]:
        """Wait for the process inside; what it says of itself: pid, uid, python, and the processes that were there."""
        self._reading = asyncio.create_task(self._read())
        try:
            return await asyncio.wait_for(asyncio.shield(self._hello), limit_s)
        except TimeoutError as error:
            raise ChannelLost(f"the process inside the sandbox said nothing for {limit_s:g} s") from error

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        max_output: int = 1 << 20,
    ) -> ExecResult:
        """A command to its end; killed with all it started at the timeout, and when the caller is cancelled."""
        ask = {"argv": list(argv), "cwd": cwd, "env": dict(env or {}), "user": user}
        async with self._stream() as (number, stream):
            began = time.monotonic()
            frames = [("R", _told({**ask, "timeout": timeout_s, "limit": max_output}))]
            frames += [("I", stdin[at : at + _CHUNK]) for at in range(0, len(stdin), _CHUNK)]
            outputs: dict[str, bytearray] = {"o": bytearray(), "e": bytearray()}
            try:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    await self._send(*((kind, number, payload) for kind, payload in [*frames, ("E", b"")]))
                    async for kind, payload in self._inbox(stream):
                        if kind in outputs:
                            outputs[kind] += payload
                        elif kind == "x":
                            return _result(_facts(payload), outputs, time.monotonic() - began)
            except TimeoutError as error:
                raise ChannelLost(f"no answer {_GRACE_S:g} s after a command's timeout") from error
            except asyncio.CancelledError:
                await asyncio.shield(self._kill(number, stream))
                raise
        raise AssertionError("the inbox ends only with an error")

    async def _kill(self, number: int, stream: _Stream) -> None:
        """End a command and all that it started; return when it is over."""
        with contextlib.suppress(SandboxLost, TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._send(("K", number, _told({"signal": 9})))
                async for kind, _ in self._inbox(stream):
                    if kind == "x":
                        return

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> "ChannelProcess":
        """Start a command and leave it running. FileNotFoundError is not raised: a command that cannot start exits
        with 126 or 127 and says why on its standard error."""
        number, stream = self._open()
        ask = {"argv": list(argv), "cwd": cwd, "env": dict(env or {}), "user": user}
        try:
            await self._send(("R", number, _told(ask)))
            async for kind, payload in self._inbox(stream):
                if kind == "s":
                    return ChannelProcess(self, number, stream, int(_facts(payload).get("pid", 0)))
        except BaseException:
            await asyncio.shield(self._kill(number, stream))
            self.forget(number)
            raise
        raise AssertionError("the inbox ends only with an error")

    async def get(self, path: str, most: int) -> bytes:
        """A file's content. FileNotFoundError, other OSErrors, ValueError when it is larger than `most` bytes."""
        data = bytearray()
        async with self._stream() as (number, stream), _in_time():
            await self._send(("G", number, _told({"path": path, "most": most})))
            async for kind, payload in self._inbox(stream):
                if kind == "x":
                    return bytes(data)
                data += payload
        raise AssertionError("the inbox ends only with an error")

    async def put(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Write a file, making its folders. OSErrors as they come."""
        async with self._stream() as (number, stream), _in_time():
            parts = [("I", number, data[at : at + _CHUNK]) for at in range(0, len(data), _CHUNK)]
            ask = _told({"path": path, "mode": mode})
            await self._send(("P", number, ask), *parts, ("E", number, b""))
            async for kind, _ in self._inbox(stream):
                if kind == "x":
                    return

    async def listen(self, port: int, connect: Connect) -> int:
        """Carry every connection to a port inside (0: a free one) to what `connect` opens; the port."""
        number, stream = self._open()
        self._listeners[number] = connect
        await self._send(("L", number, _told({"port": port})))
        async for kind, payload in self._inbox(stream):
            if kind == "s":
                return int(_facts(payload).get("port", 0))
        raise AssertionError("the inbox ends only with an error")

    async def dial(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection to a port inside; returns when both directions have ended. OSError when none listens."""
        async with self._stream() as (number, stream):
            await self._send(("C", number, _told({"port": port})))
            async for kind, _ in self._inbox(stream):
                if kind == "s":
                    break
            await self._carry(number, stream, reader, writer)

    async def silence(self, spare: Sequence[Sequence[int]], limit_s: float = 60.0) -> None:
        """End every process inside but those named as (pid, start time), and the one that answers."""
        async with self._stream() as (number, stream), _in_time(limit_s):
            await self._send(("Q", number, _told({"spare": [list(one) for one in spare]})))
            async for kind, _ in self._inbox(stream):
                if kind == "x":
                    return

    async def close(self) -> None:
        """Hang up: the process inside ends what it started, and itself."""
        self._end()
        await self._pipe.close()
        for task in (self._reading, *self._tasks):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _open(self) -> tuple[int, _Stream]:
        number = next(self._numbers)
        self._streams[number] = stream = _Stream()
        return number, stream

    @contextlib.asynccontextmanager
    async def _stream(self) -> AsyncIterator[tuple[int, _Stream]]:
        number, stream = self._open()
        try:
            yield number, stream
        finally:
            self._streams.pop(number, None)

    async def _inbox(self, stream: _Stream) -> AsyncIterator[tuple[str, bytes]]:
        """Frames of one stream, without acknowledgements; errors inside are raised here."""
        while True:
            if self.lost.is_set() and stream.inbox.empty():
                raise ChannelLost("the process inside the sandbox has ended")
            kind, payload = await stream.inbox.get()
            if kind == "!":
                raise _error(_facts(payload))
            if kind:
                yield kind, payload

    async def _send(self, *frames: tuple[str, int, bytes]) -> None:
        if self.lost.is_set():
            raise ChannelLost("the process inside the sandbox has ended")
        parts = [_HEADER.pack(len(payload), ord(kind), number) + payload for kind, number, payload in frames]
        if self._text:
            parts = [b"<" + base64.b64encode(part) + b"\n" for part in parts]
        data = b"".join(parts)
        # A frame is sent whole or not at all, whoever is cancelled meanwhile.
        await asyncio.shield(asyncio.ensure_future(self._write(data)))

    async def _write(self, data: bytes) -> None:
        try:
            async with self._writing:
                await self._pipe.write(data)
        except (OSError, SandboxError) as error:
            self._end()
            raise ChannelLost(f"the process inside the sandbox has ended ({error})") from error

    async def _read(self) -> None:
        frames, line = bytearray(), b""
        try:
            while data := await self._pipe.read():
                if self._text:
                    *lines, line = (line + data).split(b"\n")
                    data = b"".join(base64.b64decode(part[1:]) for part in lines if part.startswith(b">"))
                frames += data
                while len(frames) >= _HEADER.size:
                    size, kind, number = _HEADER.unpack_from(frames)
                    if len(frames) < _HEADER.size + size:
                        break
                    payload = bytes(frames[_HEADER.size : _HEADER.size + size])
                    del frames[: _HEADER.size + size]
                    self._take(chr(kind), number, payload)
        except (OSError, ValueError, SandboxError) as error:
            log.debug("a sandbox's channel broke: %s", error)
        finally:
            self._end()

    def _take(self, kind: str, number: int, payload: bytes) -> None:
        if kind == "h" and not self._hello.done():
            self._hello.set_result(_facts(payload))
        elif kind == "c":
            self._streams[number] = stream = _Stream()
            connect = self._listeners.get(_facts(payload).get("listener", 0))
            if connect is not None:
                self._background(self._accepted(number, stream, connect))
        elif (known := self._streams.get(number)) is None:
            return
        elif kind == "a":
            known.on_its_way -= struct.unpack(">I", payload)[0]
            if known.on_its_way < _WINDOW:
                known.room.set()
        else:
            if kind == "x":
                known.over = True
                known.room.set()
            known.inbox.put_nowait((kind, payload))

    def _end(self) -> None:
        """Nobody waits any more for what cannot come."""
        self.lost.set()
        if not self._hello.done():
            self._hello.set_exception(ChannelLost("the process inside the sandbox ended at its start"))
            self._hello.exception()
        for stream in self._streams.values():
            stream.room.set()
            stream.inbox.put_nowait(("", b""))

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accepted(self, number: int, stream: _Stream, connect: Connect) -> None:
        try:
            reader, writer = await connect()
        except OSError as error:
            log.warning("a sandbox's connection could not be carried on: %s", error)
            with contextlib.suppress(SandboxLost):
                await self._send(("K", number, _told({"signal": 9})))
        else:
            with contextlib.suppress(SandboxLost):
                await self._carry(number, stream, reader, writer)
        finally:
            self._streams.pop(number, None)

    async def _carry(
        self, number: int, stream: _Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Both directions of a connection, until both have ended or one breaks."""

        async def outward() -> None:
            try:
                while data := await reader.read(_CHUNK):
                    await self.feed(number, stream, data)
            except ConnectionError:
                await self._send(("K", number, _told({"signal": 9})))
                raise
            await self._send(("E", number, b""))

        async def inward() -> None:
            async for kind, payload in self._inbox(stream):
                if kind == "f":
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                writer.write(payload)
                await writer.drain()
                await self.acknowledge(number, len(payload))

        halves = [asyncio.create_task(outward()), asyncio.create_task(inward())]
        try:
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(*halves)
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)
            writer.close()

    async def feed(self, number: int, stream: _Stream, data: bytes) -> None:
        """Send to a stream; waits while too much is on its way."""
        for at in range(0, len(data), _CHUNK):
            part = data[at : at + _CHUNK]
            await stream.room.wait()
            if stream.over:
                raise BrokenPipeError("the process has ended")
            stream.on_its_way += len(part)
            if stream.on_its_way >= _WINDOW:
                stream.room.clear()
            await self._send(("I", number, part))

    async def acknowledge(self, number: int, count: int) -> None:
        """Tell the process inside what has been taken."""
        await self._send(("A", number, struct.pack(">I", count)))

    async def end(self, number: int) -> None:
        """No more input for a stream."""
        await self._send(("E", number, b""))

    async def signal(self, number: int, value: int) -> None:
        """Send a signal to all that a command started."""
        await self._send(("K", number, _told({"signal": int(value)})))

    async def next(self, stream: _Stream) -> tuple[str, bytes]:
        """The next frame of a stream."""
        async for found in self._inbox(stream):
            return found
        raise AssertionError("the inbox ends only with an error")

    def forget(self, number: int) -> None:
        """A stream is over."""
        self._streams.pop(number, None)


class ChannelProcess:
    """A command that runs inside. Iterate over its outputs, write to it, wait for its end."""

    def __init__(self, channel: Channel, number: int, stream: _Stream, pid: int) -> None:
        self._channel, self._number, self._stream = channel, number, stream
        self.pid = pid
        """Inside, of the process above the command."""
        self._reading, self._ended = asyncio.Lock(), asyncio.Event()
        self.exit_code: int | None = None
        """Negative: the signal that ended it. None while it runs."""

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """("stdout" or "stderr", bytes) as they come, until the end. What is not taken holds the command up. One reader
        at a time; `wait` beside it only waits."""
        names = {"o": "stdout", "e": "stderr"}
        async with self._reading:
            while not self._ended.is_set():
                try:
                    kind, payload = await self._channel.next(self._stream)
                except ChannelLost:  # what looked after it was ended, with it or by it
                    self._end(-SIGKILL)
                    return
                if kind == "x":
                    self._end(int(_facts(payload).get("status", -SIGKILL)))
                elif kind in names:
                    with contextlib.suppress(ChannelLost):
                        await self._channel.acknowledge(self._number, len(payload))
                    yield names[kind], payload

    def _end(self, status: int) -> None:
        self.exit_code = status
        self._channel.forget(self._number)
        self._ended.set()

    async def write(self, data: bytes) -> None:
        """To its standard input."""
        await self._channel.feed(self._number, self._stream, data)

    async def end_input(self) -> None:
        """Close its standard input."""
        await self._channel.end(self._number)

    async def kill(self, value: int = 9) -> None:
        """Send a signal to it and all that it started."""
        await self._channel.signal(self._number, value)

    async def wait(self) -> int:
        """Its exit code, outputs that nobody took left out."""
        if self._reading.locked():
            await self._ended.wait()
        else:
            async for _ in self.output():
                pass
        assert self.exit_code is not None
        return self.exit_code


def _facts(payload: bytes) -> dict[str, Any]:
    """What the process inside says; ChannelLost when it is not what that would say."""
    try:
        told = json.loads(payload)
    except ValueError as error:
        raise ChannelLost("the process inside the sandbox speaks another language") from error
    if not isinstance(told, dict):
        raise ChannelLost("the process inside the sandbox speaks another language")
    return told


def _told(facts: dict[str, Any]) -> bytes:
    """For the process inside, in a form that every Python reads without an import. What it answers is JSON: nothing
    from there is trusted so far."""
    return marshal.dumps(facts, 2)


@contextlib.asynccontextmanager
async def _in_time(limit_s: float = 120.0) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise ChannelLost(f"the sandbox did not answer for {limit_s:g} s") from error


def _result(told: dict[str, Any], outputs: Mapping[str, bytearray], seconds: float) -> ExecResult:
    status, timed_out = int(told.get("status", -SIGKILL)), bool(told.get("timed_out"))
    signalled = status < 0 or status in (128 + 9, 128 + 15)
    oom = bool(told.get("oom")) and status != 0
    outcome = "timeout" if timed_out else "oom" if oom else "signal" if signalled else "exited"
    return ExecResult(
        exit_code=status if status >= 0 and not timed_out else None,
        stdout=bytes(outputs["o"]),
        stderr=bytes(outputs["e"]),
        outcome=outcome,  # type: ignore[arg-type]
        truncated=bool(told.get("dropped")),
        duration_s=seconds,
    )


def _error(told: dict[str, Any]) -> Exception:
    """What went wrong inside, as the exception that it would be here."""
    number, message = getattr(errno, str(told.get("error")), None), str(told.get("message"))
    return OSError(number, message) if isinstance(number, int) else ValueError(message)

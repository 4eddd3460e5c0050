"""Host processes without threads: spawn, bounded capture, exact end (pidfd), on the running event loop."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from miles.errors import SandboxCreateFailed
from miles.sandboxes.base import ExecResult

__all__ = ["Capture", "Child", "ChildPipe", "check_timeout", "finished"]

_CHUNK = 1 << 16
_DRAIN_S = 0.2
_HOST_IS_FULL = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


class Capture:
    """Keeps the head and the tail of a stream in bounded memory; never stops reading (no SIGPIPE)."""

    def __init__(self, limit: int) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._head_limit, self._tail_limit = limit - limit // 2, limit // 2
        self.dropped = 0

    def feed(self, data: bytes) -> None:
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[max(room, 0) :]
        excess = len(self._tail) - self._tail_limit
        if excess > _CHUNK:
            self._drop(excess)

    def _drop(self, excess: int) -> None:
        del self._tail[:excess]
        self.dropped += excess

    def value(self) -> bytes:
        self._drop(max(0, len(self._tail) - self._tail_limit))
        if not self.dropped:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n[... %d bytes cut ...]\n" % self.dropped + bytes(self._tail)


def _popen(
    argv: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **settings: Any
) -> subprocess.Popen[bytes]:
    """A host process of its own session. SandboxCreateFailed when this host is full."""
    settings |= {"env": dict(env), "pass_fds": tuple(pass_fds), "start_new_session": True}
    try:
        process: subprocess.Popen[bytes] = subprocess.Popen(list(argv), stdout=subprocess.PIPE, **settings)
        return process
    except OSError as error:
        if error.errno in _HOST_IS_FULL:
            raise SandboxCreateFailed(f"this host cannot start another process: {error.strerror}") from error
        raise


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait without a thread."""
    if process.poll() is not None:
        return
    loop = asyncio.get_running_loop()
    fd = os.pidfd_open(process.pid)
    done = loop.create_future()
    loop.add_reader(fd, _resolve, done)
    try:
        await done
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    process.wait()


class Child:
    """A host process of its own session. `wait` returns its status; outputs land in two captures."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: bytes | None = None,
        limit: int = 1 << 16,
        pass_fds: Sequence[int] = (),
        cwd: str | None = None,
    ) -> None:
        """Start at once. `stdin=None` keeps the input open (its end tells the child that we are gone)."""
        self.stdout, self.stderr = Capture(limit), Capture(limit)
        self._loop = asyncio.get_running_loop()
        source = subprocess.DEVNULL if stdin == b"" else subprocess.PIPE
        self._process = _popen(argv, env, pass_fds, stdin=source, stderr=subprocess.PIPE, cwd=cwd)
        self.pid = self._process.pid
        self._open = 0
        self._closed = asyncio.Event()
        self.output = asyncio.Event()
        for pipe, capture in ((self._process.stdout, self.stdout), (self._process.stderr, self.stderr)):
            self._attach(pipe, capture)
        self._left = memoryview(stdin or b"")
        if stdin and self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
            self._loop.add_writer(self._process.stdin.fileno(), self._writable)

    def _attach(self, pipe: IO[bytes] | None, capture: Capture) -> None:
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        self._open += 1
        self._loop.add_reader(pipe.fileno(), self._readable, pipe, capture)

    def _readable(self, pipe: IO[bytes], capture: Capture) -> None:
        try:
            data = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return
        if data:
            capture.feed(data)
            self.output.set()
        else:
            self._detach(pipe)

    def _detach(self, pipe: IO[bytes]) -> None:
        if pipe.closed:
            return
        self._loop.remove_reader(pipe.fileno())
        pipe.close()
        self._open -= 1
        if not self._open:
            self._closed.set()
        self.output.set()

    def _writable(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            self._left = self._left[os.write(pipe.fileno(), self._left[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the command did not want its input
            self._left = memoryview(b"")
        if not self._left:
            self._end_input()

    def _end_input(self) -> None:
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            self._loop.remove_writer(pipe.fileno())
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    async def wait(self) -> int:
        """Wait for the process itself, then shortly for its outputs (a background child may hold them open)."""
        await _ended(self._process)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), _DRAIN_S)
        return self._process.returncode

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL the process and its session."""
        for send in (os.killpg, os.kill):
            try:
                send(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        """Let go of the pipes. The process must have been waited for or killed."""
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                self._detach(pipe)
        self._end_input()


class ChildPipe:
    """A host process that stays, by its standard input and output. `start` it, or SandboxCreateFailed."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
        self._process = _popen(argv, env, pass_fds, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._reader = asyncio.StreamReader(limit=1 << 20)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.ReadTransport | None = None

    async def start(self) -> "ChildPipe":
        """Its pipes on the loop. Nothing stays when that is cancelled."""
        try:
            return await self._start()
        except BaseException:
            self._kill()
            raise

    async def _start(self) -> "ChildPipe":
        loop, reader = asyncio.get_running_loop(), self._reader
        self._reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        writing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, self._process.stdin)
        self._writer = asyncio.StreamWriter(writing, protocol, None, loop)
        return self

    async def read(self) -> bytes:
        return await self._reader.read(_CHUNK)

    async def write(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        """Close the input; kill what does not end of it."""
        if self._writer is not None:
            self._writer.close()
        latest = time.monotonic() + _DRAIN_S
        while self._process.poll() is None and not self._reader.at_eof() and time.monotonic() < latest:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        self._kill()
        await _ended(self._process)
        if self._reading is not None:
            self._reading.close()

    def _kill(self) -> None:
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(self._process.pid, signal.SIGKILL)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def check_timeout(timeout_s: Any) -> None:
    """A timeout is a positive finite number of seconds; anything else is the caller's error."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be a positive finite number of seconds, not {timeout_s!r}")


def finished(child: Child, status: int, *, timed_out: bool, oom: bool, began: float) -> ExecResult:
    """The value of an ended command."""
    signalled = status < 0 or (status > 128 and status - 128 in {int(s) for s in signal.Signals})
    outcome = "timeout" if timed_out else "oom" if oom and status != 0 else "signal" if signalled else "exited"
    stdout, stderr = child.stdout.value(), child.stderr.value()
    return ExecResult(
        exit_code=status if status >= 0 and not timed_out else None,
        stdout=stdout,
        stderr=stderr,
        outcome=outcome,  # type: ignore[arg-type]
        truncated=bool(child.stdout.dropped or child.stderr.dropped),
        duration_s=time.monotonic() - began,
    )

"""Child processes of ours: pickled frames over a socket pair, never a port.

The child is `python -m miles.processes FD`. It dies with its parent, ignores Ctrl-C (the parent
decides), builds one object and answers calls on it. A method marked `deferred` answers later,
possibly several times; any other method answers with its return value.
"""

import asyncio
import contextlib
import ctypes
import hashlib
import importlib
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from miles.errors import MilesError

__all__ = [
    "Reply",
    "Worker",
    "deferred",
    "die_with_parent",
    "machine_tag",
    "owner_is_dead",
    "owner_mark",
    "owner_tag",
    "process_tag",
    "scratch_folder",
]

Reply = Callable[..., None]
F = TypeVar("F", bound=Callable[..., Any])
_PR_SET_PDEATHSIG = 1


def process_tag(pid: int) -> str:
    """ "pid-starttime": a reused pid is not mistaken for its predecessor. FileNotFoundError when there is none."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


@cache
def _own_tag(pid: int) -> str:
    return process_tag(pid)


def owner_tag() -> str:
    """The tag of this process; what it leaves behind is named by it, so that a later run can clear it."""
    return _own_tag(os.getpid())


@cache
def machine_tag() -> str:
    """Names this boot of this machine, and this namespace of processes: only there can an owner's pid be looked up."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    told = boot.read_text() if boot.exists() else socket.gethostname()
    return hashlib.sha256(f"{told} {Path('/proc/self/ns/pid').stat().st_ino}".encode()).hexdigest()[:8]


def owner_mark() -> str:
    """The owner's tag, and where it can be looked up: for what others may find and must not judge."""
    return f"{owner_tag()}@{machine_tag()}"


def owner_is_dead(mark: str) -> bool:
    """Whether a mark's owner was a process of this machine and namespace, and has ended. Others are not judged here."""
    tag, _, machine = mark.partition("@")
    pid = tag.partition("-")[0]
    if machine != machine_tag() or not pid.isdigit():
        return False
    try:
        return process_tag(int(pid)) != tag
    except (FileNotFoundError, ProcessLookupError):
        return True


def scratch_folder(name: str, parent: Path | None = None) -> Path:
    """A new temporary folder of this process; folders of the same name whose owners are dead are removed."""
    root, prefix = parent or Path(tempfile.gettempdir()), f"miles-{name}-{machine_tag()}-"
    for folder in root.glob(f"{prefix}*-*-*"):
        pid, start = folder.name.removeprefix(prefix).split("-")[:2]
        try:
            alive = process_tag(int(pid)) == f"{pid}-{start}"
        except (FileNotFoundError, ProcessLookupError, ValueError):
            alive = False
        if not alive:
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{owner_tag()}-", dir=root))


def deferred(method: F) -> F:
    """Mark a worker method that takes `reply` first and calls it itself: `reply(value, last=True)`."""
    method.__dict__["deferred"] = True
    return method


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; elsewhere the closed socket ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Worker:
    """The parent's end of one child process. Use `await Worker.start(...)`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], conn: Connection, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._conn = conn
        self._failed: type[MilesError] = MilesError
        self._lost: type[MilesError] = MilesError
        self._calls: dict[int, tuple[asyncio.Future[Any], Callable[[Any], None] | None]] = {}
        self._next_id = 0
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        threading.Thread(target=self._write, name=f"{name} writer", daemon=True).start()

    @classmethod
    async def start(
        cls,
        target: str,
        kwargs: dict[str, Any],
        *,
        name: str,
        log: Path,
        failed: type[MilesError],
        lost: type[MilesError],
        env: dict[str, str] | None = None,
    ) -> "Worker":
        """Spawn a child that builds `target` ("module:attr") with `kwargs`; return when it is ready.

        `failed` wraps an exception of the child's code, `lost` tells that the child is gone.
        Its standard output and error go to `log`.
        """
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            process = subprocess.Popen(  # noqa: ASYNC220  returns after the fork
                [sys.executable, "-m", "miles.processes", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(env or {}), "MILES_PARENT": str(os.getpid())},
            )
        theirs.close()
        worker = cls(name, process, Connection(ours.detach()), log)
        worker._failed, worker._lost = failed, lost
        worker._loop.add_reader(worker._conn.fileno(), worker._receive)
        try:
            await worker._send((0, target, kwargs), worker._register(0, None))
        except BaseException:
            await worker.close(grace_s=0)
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, method: str, on_item: Callable[[Any], None] | None = None, **kwargs: Any) -> Any:
        """Run one method in the child. `on_item` receives the replies before the last one."""
        if self.ended.is_set():
            raise self._lost(self._obituary())
        self._next_id += 1
        return await self._send((self._next_id, method, kwargs), self._register(self._next_id, on_item))

    def _register(self, call_id: int, on_item: Callable[[Any], None] | None) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls[call_id] = (future, on_item)
        return future

    async def _send(self, frame: tuple[Any, ...], future: "asyncio.Future[Any]") -> Any:
        self._outbox.put(pickle.dumps(frame))
        return await future

    def _write(self) -> None:
        """The only sender, on a thread of its own: a full socket must not stop the loop that empties the other one,
        and a cancelled call must not leave half a frame."""
        while (data := self._outbox.get()) is not None:
            try:
                self._conn.send_bytes(data)
            except OSError:
                with contextlib.suppress(RuntimeError):  # the loop may be closed already
                    self._loop.call_soon_threadsafe(self._on_end)
                return

    def _receive(self) -> None:
        try:
            while not self.ended.is_set() and self._conn.poll():
                call_id, kind, value = self._conn.recv()
                self._deliver(call_id, kind, value)
        except (EOFError, OSError):
            self._on_end()

    def _deliver(self, call_id: int, kind: str, value: Any) -> None:
        future, on_item = self._calls.get(call_id, (None, None))
        if kind == "item":
            if on_item is not None:
                on_item(value)
            return
        self._calls.pop(call_id, None)
        if future is None or future.done():
            return
        if kind == "ok":
            future.set_result(value)
        elif isinstance(value, MilesError):
            future.set_exception(value)
        else:
            future.set_exception(self._failed(f"{self.name}: {value}"))

    def _on_end(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._outbox.put(None)
        self._loop.remove_reader(self._conn.fileno())
        self._conn.close()
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            if not future.done():
                future.set_exception(self._lost(self._obituary()))

    def _obituary(self) -> str:
        code = self._process.poll()
        tail = b""
        if self.log.exists():
            tail = b"\n".join(self.log.read_bytes().splitlines()[-5:])
        text = f"{self.name} (pid {self.pid}) ended"
        text += f" with status {code}" if code is not None else ""
        return f"{text}; its log is {self.log}" + (f": {tail.decode(errors='replace')}" if tail else "")

    async def close(self, grace_s: float = 5.0) -> None:
        """End the child: close its socket, then SIGKILL after `grace_s`. Safe to call twice."""
        self._on_end()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), grace_s)
        except TimeoutError:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


def _serve(conn: Connection) -> None:
    lock = threading.Lock()

    def send(call_id: int, kind: str, value: Any) -> None:
        with lock:
            conn.send((call_id, kind, value))

    def replier(call_id: int) -> Reply:
        def reply(value: Any = None, *, last: bool = True, error: BaseException | None = None) -> None:
            if error is not None:
                send(call_id, "error", _portable(error))
            else:
                send(call_id, "ok" if last else "item", value)

        return reply

    target: Any = None
    while True:
        try:
            call_id, method, kwargs = conn.recv()
        except EOFError:
            break
        reply = replier(call_id)
        try:
            if target is None:
                module, _, attr = method.partition(":")
                target = getattr(importlib.import_module(module), attr)(**kwargs)
                reply()
                continue
            handler = getattr(target, method)
            if getattr(handler, "deferred", False):
                handler(reply, **kwargs)
            else:
                reply(handler(**kwargs))
        except Exception as error:  # noqa: BLE001  the boundary: every failure is the caller's to see
            reply(error=error)
    if target is not None and hasattr(target, "close"):
        target.close()


def _portable(error: BaseException) -> Any:
    traceback.print_exception(error)
    return error if isinstance(error, MilesError) else f"{type(error).__name__}: {error}"


def main(fd: int) -> None:
    """Entry of the child process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    if str(os.getppid()) != os.environ.get("MILES_PARENT"):
        return
    with Connection(fd) as conn:
        try:
            _serve(conn)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))

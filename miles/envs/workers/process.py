"""One life of a worker, seen from Miles: started, asked by threads and event loops, ended with all it started."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.errors import EngineError, EnvError, HarnessError, MilesError
from miles.processes import owner_mark, scratch_folder
from miles.sandboxes.local.reaper import processes_with

__all__ = ["PROTOCOL", "Handler", "WorkerProcess", "end_of", "end_with_children", "launched", "quiet_environment"]

PROTOCOL = 1
GUEST = Path(__file__).parent / "guest"
Handler = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""Answers a request that the worker makes for an episode."""

_KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "DOCKER_HOST")
_QUIET = {
    "DO_NOT_TRACK": "1",
    "HARBOR_TELEMETRY": "0",
    "HUD_CLI_ANALYTICS_ENABLED": "0",
    "HUD_TELEMETRY_ENABLED": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


def quiet_environment(secrets: Sequence[str] = (), more: Mapping[str, str] | None = None) -> dict[str, str]:
    """What an environment's code sees of ours: no keys but the named ones, and other people's telemetry switched off.

    EnvError names a secret that is not set.
    """
    missing = [name for name in secrets if name not in os.environ]
    if missing:
        raise EnvError(f"the environment needs {', '.join(missing)}: export it before you start")
    kept = {name: os.environ[name] for name in (*_KEPT, *secrets) if name in os.environ}
    return {**kept, **_QUIET, **(more or {})}


class WorkerProcess:
    """Ask with `call` (a future of threads) or `ask` (awaits it). Use `start`; it blocks until the worker connects."""

    def __init__(self, process: "subprocess.Popen[bytes]", link: socket.socket, folder: Path, log: Path) -> None:
        self._process, self._link, self._folder, self.log = process, link, folder, log
        self._numbers = itertools.count(1)
        self._calls: dict[int, concurrent.futures.Future[Any]] = {}
        self._handlers: dict[str, tuple[asyncio.AbstractEventLoop, Handler]] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sending, self._waiting = threading.Lock(), 0
        self._ended = threading.Event()
        self.tired = False
        """Whether something in it hangs: it gets no new episodes, and goes with its last one."""
        self.episodes: set[str] = set()
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"worker {process.pid} {work.__name__}", daemon=True).start()

    @classmethod
    def start(
        cls,
        python: Path,
        kind: str,
        *,
        log: Path,
        environment: Mapping[str, str],
        cwd: Path | None = None,
        paths: Sequence[Path] = (),
        limit_s: float = 60.0,
    ) -> "WorkerProcess":
        """Launch it and wait until it connects. EnvError, with the end of its log, when it ends or takes too long."""
        folder = scratch_folder("worker")
        path = folder / "socket"
        log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as listener, log.open("ab") as sink:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(0.02)
            process = launched(
                [python, GUEST, path, kind],
                sink=sink,
                folder=folder,
                cwd=cwd,
                environment={**environment, "MILES_WORKER_PATH": os.pathsep.join(map(str, paths))},
            )
            deadline = time.monotonic() + limit_s
            while True:
                try:
                    link, _ = listener.accept()
                    break
                except TimeoutError:
                    if process.poll() is None and time.monotonic() < deadline:
                        continue
                code = process.poll()
                end_with_children(process, folder)
                how = f"ended with status {code}" if code is not None else f"did not connect within {limit_s:g} s"
                raise EnvError(f"the worker {how}; {log} ends with:\n{end_of(log)}")
        link.settimeout(None)
        return cls(process, link, folder, log)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def listen(self, episode: str, handler: Handler) -> None:
        """Answer what the worker asks for `episode` with `handler`, in the running event loop."""
        self._handlers[episode] = (asyncio.get_running_loop(), handler)

    def forget(self, episode: str) -> None:
        """The episode asks nothing more."""
        self._handlers.pop(episode, None)

    def call(self, method: str, **params: Any) -> "concurrent.futures.Future[Any]":
        """Send a request. The future raises EnvError, HarnessError or EngineError by whose failure it was."""
        return self._call(method, params)[1]

    def _call(self, method: str, params: dict[str, Any]) -> tuple[int, "concurrent.futures.Future[Any]"]:
        number, future = next(self._numbers), concurrent.futures.Future[Any]()
        self._calls[number] = future
        self._send({"id": number, "method": method, "params": params})
        if self.ended:
            self._bury()
        return number, future

    async def ask(self, method: str, **params: Any) -> Any:
        """`call`, awaited; a cancelled wait cancels the work inside, where it is asynchronous."""
        number, future = self._call(method, params)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._calls.pop(number, None)
            self._send({"method": "cancel", "params": {"id": number}})
            raise

    def _send(self, message: dict[str, Any]) -> None:
        """Never blocks: what the socket does not take at once is left to a thread, and what follows goes behind it."""
        data = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        with self._sending:
            if not self._waiting:
                with contextlib.suppress(OSError):  # full, or closed: the thread finds out which
                    data = data[self._link.send(data, socket.MSG_DONTWAIT) :]
            if data:
                self._waiting += 1
                self._outbox.put(data)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._outbox.get()) is not None:
                self._link.sendall(data)
                with self._sending:
                    self._waiting -= 1

    def _read(self) -> None:
        try:
            with self._link.makefile("rb") as lines:
                for line in lines:
                    self._take(json.loads(line))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass  # a closed socket, or no JSON-RPC: either way nothing more can be understood
        finally:
            self._ended.set()
            self._bury()

    def _take(self, message: dict[str, Any]) -> None:
        if "method" in message:
            self._serve(message)
            return
        future = self._calls.pop(message["id"], None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if "error" not in message:
            future.set_result(message.get("result"))
        elif isinstance(message["error"], dict):
            future.set_exception(_failure(message["error"]))
        else:
            future.set_exception(EnvError(f"the worker answered with an error that is none: {message['error']!r}"))

    def _serve(self, message: dict[str, Any]) -> None:
        """A request of the worker's, answered in the event loop of the episode that it is for."""
        params = message["params"]
        loop, handler = self._handlers.get(params.pop("episode"), (None, None))
        if loop is None or handler is None or loop.is_closed():
            if "id" in message:
                self._send({"id": message["id"], "error": {"code": -32001, "message": "the episode is over"}})
            return
        work = asyncio.run_coroutine_threadsafe(_awaited(handler(message["method"], params)), loop)
        if "id" in message:
            work.add_done_callback(lambda done: self._send({"id": message["id"], **_reply(done)}))

    def _bury(self) -> None:
        while self._calls:
            with contextlib.suppress(KeyError):
                _, future = self._calls.popitem()
                if future.set_running_or_notify_cancel():
                    future.set_exception(EnvError(f"the worker is gone; {self.log} ends with:\n{end_of(self.log)}"))

    def close(self) -> None:
        """End it and all that it started. Safe to call twice."""
        self._ended.set()
        self._outbox.put(None)
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
        end_with_children(self._process, self._folder)
        self._bury()


def launched(
    command: Sequence[Any], *, sink: Any, folder: Path, environment: Mapping[str, str], **more: Any
) -> "subprocess.Popen[bytes]":
    """A process of an environment's own, in a group of its own, marked so that all it starts is found by `folder`.

    EnvError when it cannot be started; the folder goes with it."""
    marks = {"MILES_OWNER": owner_mark(), "MILES_WORKER": folder.name}
    env = {**environment, **marks}
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True, env=env, **more
        )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise EnvError(f"{command[0]} cannot be started: {error.strerror}; miles env sync installs it anew") from error


def end_with_children(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Kill a process, its group, and what carries the name of its folder in MILES_WORKER; remove the folder."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in processes_with(f"MILES_WORKER={folder.name}"):  # those that left the group
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def _reply(done: "concurrent.futures.Future[Any]") -> dict[str, Any]:
    if done.cancelled():
        return {"error": {"code": -32001, "message": "the episode is over"}}
    if (error := done.exception()) is not None:
        return {"error": {"code": -32002, "message": f"{type(error).__name__}: {error}"}}
    return {"result": done.result()}


def _failure(error: Mapping[str, Any]) -> MilesError:
    data = error.get("data") or {}
    text = str(error.get("message"))
    kind = data.get("kind")
    if kind == "policy":
        return HarnessError(text, reason=data.get("reason") or "agent_failed")
    if kind == "engine":
        return EngineError(text)
    trace = "" if kind in ("task", "unsupported") else str(data.get("trace") or "").strip()
    return EnvError(f"{text}\n{trace[-1500:]}".strip())


def end_of(log: Path) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-12:]) or "(nothing)"
    except OSError:
        return "(no log)"

"""The worker's side of the protocol: JSON-RPC 2.0, one message a line, over a Unix socket (docs/env-workers.md).

Runs on the environment's own Python (3.9 or newer) with the standard library and that environment's packages. KIND
names a module of `adapters`, or is FILE.py: it has `make(settings) -> Adapter`. The worker ends, and with it all that
it started, when the socket closes.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

PROTOCOL = 1
LIMIT = 1 << 28  # bytes of one message


class Failure(Exception):
    """What an adapter raises to say whose failure it was.

    kind: "env" (the environment's code), "task" (no such task), "policy" (the agent's own fault, `reason` counts it),
    "engine" (the model endpoint failed), "unsupported".
    """

    def __init__(self, message, kind="env", reason=""):
        super().__init__(message)
        self.kind, self.reason = kind, reason


class Episode:
    """One live episode: what the adapter made of a task, and the thread that its blocking code runs on."""

    def __init__(self, played):
        self.played = played
        self._thread = None

    async def call(self, name, *args, **kwargs):
        """Blocking methods run on this episode's own thread: some environments know only the one that made them."""
        method = getattr(self.played, name, None)
        if method is None:
            raise Failure(f"this environment has no {name}", "unsupported")
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        return await self.run(lambda: method(*args, **kwargs))

    async def run(self, work):
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="episode")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def idle(self):
        """Return when its thread is free: what hangs there makes the host's wait for `close` run out."""
        if self._thread is not None:
            await self.run(lambda: None)

    def end(self):
        if self._thread is not None:
            self._thread.shutdown(wait=False)


class Host:
    """What an adapter may ask of Miles, for one episode."""

    def __init__(self, worker, episode):
        self._worker, self._episode = worker, episode

    async def ask(self, method, **params):
        """`exec`, `read` or `write` in the episode's sandbox; Failure when that fails."""
        return await self._worker.ask(method, dict(params, episode=self._episode))

    def log(self, text):
        """A line for the episode's log."""
        self._worker.send({"method": "log", "params": {"episode": self._episode, "text": str(text)[:2000]}})


class Worker:
    """Answers requests of the host until the socket closes."""

    def __init__(self, reader, writer, kind):
        self._reader, self._writer, self._kind = reader, writer, kind
        self._adapter = None
        self._episodes = {}
        self._running = {}
        self._asked = {}
        self._next = 0

    async def serve(self):
        while True:
            line = await self._reader.readline()
            if not line:
                return
            message = json.loads(line)
            if "method" not in message:
                self._answered(message)
            elif message["method"] == "cancel":
                task = self._running.get(message["params"]["id"])
                if task is not None:
                    task.cancel()
            else:
                task = asyncio.ensure_future(self._handle(message))
                self._running[message["id"]] = task

    async def _handle(self, message):
        number = message["id"]
        try:
            result = await getattr(self, "on_" + message["method"])(**message.get("params", {}))
            reply = {"id": number, "result": result}
            encoded = _encode(reply)
        except asyncio.CancelledError:
            encoded = _encode(_error(number, "cancelled", "cancelled", ""))
        except Failure as error:
            encoded = _encode(_error(number, error.kind, str(error), traceback.format_exc(), error.reason))
        except BaseException as error:  # the boundary to an environment's code
            text = f"{type(error).__name__}: {error}"
            encoded = _encode(_error(number, "env", text, traceback.format_exc()))
        finally:
            self._running.pop(number, None)
        self._writer.write(encoded)

    def send(self, message):
        self._writer.write(_encode(message))

    async def ask(self, method, params):
        self._next += 1
        number = f"w{self._next}"
        self._asked[number] = asyncio.get_running_loop().create_future()
        self.send({"id": number, "method": method, "params": params})
        return await self._asked[number]

    def _answered(self, message):
        future = self._asked.pop(message["id"], None)
        if future is None or future.done():
            return
        if "error" in message:
            future.set_exception(Failure(message["error"]["message"], "host"))
        else:
            future.set_result(message["result"])

    async def on_hello(self, protocol, settings):
        if protocol != PROTOCOL:
            raise Failure(f"this worker speaks protocol {PROTOCOL}, not {protocol}", "unsupported")
        module = _module(self._kind)
        try:
            self._adapter = module.make(settings)  # on the main thread: some packages set signal handlers
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise Failure(f"it does not know a setting: {error}", "task") from None
        about = await _maybe(self._adapter.about())
        return dict({"protocol": PROTOCOL, "python": sys.version.split()[0]}, **about)

    async def on_tasks(self, split, start, stop):
        return await _blocking(self._adapter.tasks, split, start, stop)

    async def on_reset(self, episode, task, seed):
        live = Episode(None)
        live.host = Host(self, episode)
        self._episodes[episode] = live
        if inspect.iscoroutinefunction(self._adapter.play):
            live.played = await self._adapter.play(task, seed, live.host)
        else:
            await live.run(lambda: setattr(live, "played", self._adapter.play(task, seed, live.host)))
        return await live.call("reset")

    async def on_step(self, episode, action):
        return await self._live(episode).call("step", action)

    async def on_run(self, episode, endpoint, timeout_s):
        return await self._live(episode).call("run", endpoint, timeout_s)

    async def on_score(self, episode, transcript):
        return await self._live(episode).call("score", transcript)

    async def on_gold(self, task):
        gold = getattr(self._adapter, "gold", None)
        return None if gold is None else await _blocking(gold, task)

    async def on_random_actions(self, task, count):
        draw = getattr(self._adapter, "random_actions", None)
        return [] if draw is None else await _blocking(draw, task, task.get("seed") or 0, count)

    async def on_close(self, episode):
        live = self._episodes.pop(episode, None)
        if live is None:
            return None
        try:
            await live.idle()
            if hasattr(live.played, "close"):
                await live.call("close")
        finally:
            live.end()
        return None

    def _live(self, episode):
        try:
            return self._episodes[episode]
        except KeyError:
            raise Failure(f"episode {episode} is not open") from None


async def _maybe(value):
    return await value if inspect.isawaitable(value) else value


async def _blocking(method, *args):
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    return await asyncio.get_running_loop().run_in_executor(None, lambda: method(*args))


def _error(number, kind, message, trace, reason=""):
    data = {"kind": kind, "trace": trace[-4000:], "reason": reason}
    return {"id": number, "error": {"code": -32000, "message": message[:4000], "data": data}}


def _encode(message):
    return json.dumps(dict(message, jsonrpc="2.0"), default=plain).encode() + b"\n"


def plain(value):
    """What JSON does not know: numpy's numbers and arrays, sets, paths; anything else as its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)


def _module(kind):
    if kind.endswith(".py"):
        spec = importlib.util.spec_from_file_location("adapter", kind)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return importlib.import_module("miles_worker.adapters." + kind)


async def main(path, kind):
    reader, writer = await asyncio.open_unix_connection(path, limit=LIMIT)
    worker = Worker(reader, writer, kind)
    with contextlib.suppress(ConnectionError):
        await worker.serve()


def run(path, kind):
    """The whole life of a worker; never returns."""
    sys.path[1:1] = [folder for folder in os.environ.get("MILES_WORKER_PATH", "").split(os.pathsep) if folder]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group: the host decides
    sys.stdout = sys.stderr
    try:
        asyncio.run(main(path, kind))
    finally:
        os.killpg(0, signal.SIGKILL)

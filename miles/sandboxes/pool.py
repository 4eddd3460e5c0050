"""What every backend needs once: how many, how fast, deadlines, retries, cancel-safe creation, warm ones, reaping."""

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from miles.config import Config
from miles.errors import ConfigError, SandboxCreateFailed, SandboxError
from miles.registry import resolve
from miles.sandboxes.base import Backend, Capabilities, Image, Sandbox, SandboxSpec

__all__ = ["SandboxConfig", "SandboxPool", "image_of", "make_backend"]

log = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 30.0


class SandboxConfig(Config):
    """Which provider, and how it is treated."""

    backend: str = "local"
    """local, docker, e2b, agentenv, modal, daytona, or `module:attr`."""
    image: str = ""
    """For tasks that name none: a name that the provider knows, `dockerfile:FOLDER` or `rootfs:PATH`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The backend's own settings (`miles sandbox list` names them)."""
    starting: int = Field(4, gt=0)
    """How many sandboxes may come up at the same time."""
    per_minute: int | None = Field(None, gt=0)
    """How many may be asked for in a minute; None: as many as come."""
    most: int | None = Field(None, gt=0)
    """How many may be alive, to stay below a quota; others wait. None: no limit of ours."""
    warm: int = Field(0, ge=0)
    """Sandboxes of each kind that are made ahead, so that an episode need not wait."""
    ttl_s: float = Field(3600.0, gt=0)
    """A provider that can ends a sandbox by itself after this time, should nobody do."""
    create_timeout_s: float | None = Field(None, gt=0)
    """Deadline of one creation; None: 30 s on this host, 300 s elsewhere, where an image may have to be built first."""
    destroy_timeout_s: float = Field(30.0, gt=0)
    """Deadline of one destruction."""
    create_retries: int = Field(3, ge=0)
    """How often a retryable creation failure is tried again, each time after a longer pause."""
    reap_every_s: float = Field(300.0, gt=0)
    """How often to look for what dead owners left."""
    allow_unisolated: bool = False
    """Run plain processes where this host cannot isolate. The agent then sees this machine."""


def make_backend(config: SandboxConfig) -> Backend:
    """The backend that a config names. ConfigError for settings that it does not know."""
    own = {"allow_unisolated": config.allow_unisolated} if config.backend == "local" else {}
    plugin = resolve("sandboxes", config.backend)
    if not callable(plugin):
        return plugin  # type: ignore[no-any-return]
    try:
        backend: Backend = plugin(**own, **config.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sandbox.settings do not fit the backend {config.backend!r}: {error}") from error
    return backend


def image_of(text: str) -> Image | None:
    """`dockerfile:FOLDER`, `rootfs:PATH`, or a name; None for nothing."""
    kind, _, rest = text.partition(":")
    if kind in ("dockerfile", "rootfs"):
        path = Path(rest).expanduser()
        return Image(dockerfile=path) if kind == "dockerfile" else Image(rootfs=path)
    return Image(ref=text) if text else None


class _Abandoned(BaseException):
    """A creation that nobody waits for any more, and why."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class SandboxPool:
    """Hands out sandboxes and takes every one of them back, whatever happens in between."""

    def __init__(self, backend: Backend, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.counters: Counter[str] = Counter()
        self.capabilities: Capabilities | None = None
        self._backend = backend
        self._image = image_of(self.config.image)
        self._starting = asyncio.Semaphore(self.config.starting)
        self._create_s = self.config.create_timeout_s or (30.0 if self.config.backend == "local" else 300.0)
        self._room = asyncio.Semaphore(self.config.most) if self.config.most else None
        self._next_at = 0.0
        self._live: dict[str, Sandbox] = {}
        self._ready: dict[str, deque[tuple[float, Sandbox]]] = {}
        self._coming: Counter[str] = Counter()
        self._prepared: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._looking_after: list[asyncio.Task[None]] = []
        self._undead: list[Sandbox] = []
        self._waiting = 0  # for room
        self._closing = False

    async def start(self) -> Capabilities:
        """Check the host and clear what earlier runs left. Raises SandboxUnavailable."""
        self.capabilities = await self._backend.probe()
        self.counters["reaped"] += await self._backend.reap()
        self._looking_after = [asyncio.create_task(self._reap_now_and_then()), asyncio.create_task(self._keep_alive())]
        return self.capabilities

    async def _reap_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self.config.reap_every_s)
            await self._end_the_undead()
            try:
                self.counters["reaped"] += await self._backend.reap()
            except SandboxError as error:
                log.warning("what dead owners left could not be reaped now: %s", error)

    async def _keep_alive(self) -> None:
        """A machine ends when this process no longer says that it is needed."""
        while True:
            await asyncio.sleep(self.config.ttl_s / 3)
            for sandbox in list(self._live.values()):
                with contextlib.suppress(SandboxError, AttributeError):  # its next command tells what has become of it
                    await sandbox.keepalive(self.config.ttl_s)

    def settled(self, spec: SandboxSpec) -> SandboxSpec:
        """A task's spec with the config's image and time to live. SandboxError when the backend cannot make it."""
        spec = replace(spec, image=spec.image or self._image, ttl_s=min(spec.ttl_s, self.config.ttl_s))
        if self.capabilities is not None and (lacks := self.capabilities.lacks(spec)):
            raise SandboxError(
                f"the sandbox backend {self._backend.name!r} cannot offer this task: {lacks}; choose another one "
                "(sandbox.backend=…, `miles sandbox list`)"
            )
        return spec

    @contextlib.asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A fresh sandbox, destroyed at the end also when the caller is cancelled."""
        spec = self.settled(spec)
        sandbox = await self._take_warm(spec) if self.config.warm else None
        if sandbox is None:
            sandbox = await self._create(spec)
        try:
            yield sandbox
        finally:
            await asyncio.shield(self._spawn(self._destroy(sandbox)))

    async def fork(self, sandbox: Sandbox, spec: SandboxSpec, count: int) -> list[Sandbox]:
        """Sandboxes that begin where one is; the caller gives each back with `give_back`."""
        image = await sandbox.snapshot()
        forked = replace(self.settled(spec), image=image, files={})
        creations = [self._spawn(self._create(forked)) for _ in range(count)]
        try:
            return list(await asyncio.gather(*creations))
        except BaseException:
            for creation in creations:
                self._discard_later(creation)
            raise

    async def give_back(self, sandbox: Sandbox) -> None:
        """End a sandbox that `fork` made."""
        await asyncio.shield(self._spawn(self._destroy(sandbox)))

    async def close(self) -> None:
        """Destroy everything that is alive, wait for what is under way, reap."""
        self._closing = True
        for task in self._looking_after:
            task.cancel()
        for sandbox in list(self._live.values()):
            self._spawn(self._destroy(sandbox))
        if self._background:
            await asyncio.wait(set(self._background), timeout=self._create_s)
        while self._background:  # a provider that hangs: its tasks clean up when they are cancelled
            for task in self._background:
                task.cancel()
            await asyncio.wait(set(self._background), timeout=self.config.destroy_timeout_s)
        await self._end_the_undead()
        try:
            self.counters["reaped"] += await self._backend.reap()
        except SandboxError as error:  # the work is done: that is no reason to lose it
            log.warning("what dead owners left could not be reaped: %s", error)
        finally:
            await self._backend.close()

    async def _take_warm(self, spec: SandboxSpec) -> Sandbox | None:
        """One that was made ahead, given this spec's files and variables; others are made in its place."""
        bare = replace(spec, files={}, env={}, labels={})  # what cannot be given to it later
        kind = repr(bare)
        ready = self._ready.setdefault(kind, deque())
        found = None
        while ready and found is None:
            made_at, sandbox = ready.popleft()
            adopt = getattr(sandbox, "adopt", None)
            if adopt is None or time.monotonic() - made_at > spec.ttl_s / 2:
                self._spawn(self._destroy(sandbox))
                continue
            try:
                await asyncio.wait_for(adopt(spec), self._create_s)
                found = sandbox
                self.counters["warm"] += 1
            except (SandboxError, TimeoutError):
                self._spawn(self._destroy(sandbox))
            except BaseException:
                self._spawn(self._destroy(sandbox))
                raise
        for _ in range(self.config.warm - len(ready) - self._coming[kind]):
            self._coming[kind] += 1
            self._spawn(self._warm(bare, kind, ready))
        return found

    async def _warm(self, bare: SandboxSpec, kind: str, ready: deque[tuple[float, Sandbox]]) -> None:
        try:
            sandbox = await self._create(bare, ahead=True)
        except SandboxError as error:
            log.info("no sandbox could be made ahead: %s", error)
        else:
            if self._closing or self._waiting:
                await self._destroy(sandbox)
            else:
                ready.append((time.monotonic(), sandbox))
        finally:
            self._coming[kind] -= 1

    async def _prepare(self, image: Image) -> None:
        """Once for each digest, however many wait for it; a failure is forgotten, so that the next one tries again."""
        digest = await asyncio.to_thread(image.digest)
        if digest not in self._prepared:
            self._prepared[digest] = asyncio.create_task(self._backend.prepare(image))
        task = self._prepared[digest]
        try:
            await asyncio.shield(task)
        except BaseException:
            if task.done() and self._prepared.get(digest) is task and (task.cancelled() or task.exception()):
                del self._prepared[digest]
            raise

    async def _create(self, spec: SandboxSpec, *, ahead: bool = False) -> Sandbox:
        for attempt in itertools.count():
            try:
                if spec.image is not None:
                    await self._prepare(spec.image)
                return await self._create_once(spec, ahead)
            except SandboxError as error:
                self.counters["create_failed"] += 1
                if not error.retryable or attempt >= self.config.create_retries:
                    raise
                pause_s = min(_LONGEST_PAUSE_S, 0.1 * 4**attempt)
                await asyncio.sleep(random.uniform(0.5, 1.5) * pause_s)
        raise AssertionError("the loop returns or raises")

    async def _create_once(self, spec: SandboxSpec, ahead: bool) -> Sandbox:
        if self._room is not None:
            if self._room.locked():
                if ahead:
                    raise SandboxError("there is no room for one that nobody waits for")
                self._give_up_a_ready_one()
            self._waiting += 1
            try:
                await self._room.acquire()
            finally:
                self._waiting -= 1
        try:
            sandbox = await self._start_one(spec)
        except _Abandoned as error:  # it still comes up, and has its room until then
            raise error.cause from None
        except BaseException:
            if self._room is not None:
                self._room.release()
            raise
        self._live[sandbox.id] = sandbox
        return sandbox

    def _give_up_a_ready_one(self) -> None:
        """Rather this than that an episode waits for a sandbox that nobody uses."""
        for ready in self._ready.values():
            if ready:
                self._spawn(self._destroy(ready.popleft()[1]))
                return

    async def _start_one(self, spec: SandboxSpec) -> Sandbox:
        async with self._starting:
            await self._turn()
            began, limit_s = time.monotonic(), self._create_s
            task = self._spawn(self._backend.create(spec))
            try:
                sandbox: Sandbox = await asyncio.wait_for(asyncio.shield(task), limit_s)
            except TimeoutError:
                self._discard_later(task, self._room)
                raise _Abandoned(
                    SandboxCreateFailed(
                        f"no sandbox after {limit_s:g} s; the host or the provider may be overloaded "
                        "(sandbox.create_timeout_s, sandbox.starting)"
                    )
                ) from None
            except asyncio.CancelledError as error:
                self._discard_later(task, self._room)
                raise _Abandoned(error) from None
        self.counters["created"] += 1
        self.counters["create_ms"] += int(1000 * (time.monotonic() - began))
        return sandbox

    async def _turn(self) -> None:
        """Wait until the next creation may be asked for."""
        if self.config.per_minute is None:
            return
        now = time.monotonic()
        at = max(now, self._next_at)
        self._next_at = at + 60 / self.config.per_minute
        await asyncio.sleep(at - now)

    def _discard_later(self, task: "asyncio.Task[Sandbox]", room: asyncio.Semaphore | None = None) -> None:
        """A creation nobody waits for any more: let it finish, then destroy what it made. It keeps its room so long."""

        async def discard() -> None:
            try:
                sandbox = await task
            except (SandboxError, asyncio.CancelledError):
                return
            finally:
                if room is not None:
                    room.release()
            if sandbox.id in self._live:
                await self._destroy(sandbox)
            else:
                await self._end(sandbox)

        self._spawn(discard())

    async def _destroy(self, sandbox: Sandbox) -> None:
        if self._live.pop(sandbox.id, None) is None:
            return
        try:
            await self._end(sandbox)
        finally:
            if self._room is not None:
                self._room.release()

    async def _end(self, sandbox: Sandbox) -> None:
        try:
            await asyncio.wait_for(sandbox.destroy(), self.config.destroy_timeout_s)
            self.counters["destroyed"] += 1
        except Exception as error:  # noqa: BLE001  whatever it is, it is tried again
            self.counters["destroy_failed"] += 1
            self._undead.append(sandbox)
            log.warning("sandbox %s could not be destroyed now: %s: %s", sandbox.id, type(error).__name__, error)

    async def _end_the_undead(self) -> None:
        """Those that could not be destroyed before."""
        undead, self._undead = self._undead, []
        await asyncio.gather(*map(self._end, undead))

    def metrics(self) -> dict[str, float]:
        """For a step's line: counts since the last call, and how many are alive and ready."""
        found = {f"sandbox/{name}": float(count) for name, count in self.counters.items() if count}
        self.counters.clear()
        ready = sum(map(len, self._ready.values()))
        return found | {"sandbox/alive": float(len(self._live)), "sandbox/ready": float(ready)}

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

"""What every backend needs once: start concurrency, deadlines, retries, cancel-safe creation, reaping."""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from pydantic import Field

from miles.config import Config
from miles.errors import SandboxCreateFailed, SandboxError
from miles.sandboxes.base import Backend, Capabilities, Sandbox, SandboxSpec

__all__ = ["SandboxConfig", "SandboxPool"]

log = logging.getLogger(__name__)


class SandboxConfig(Config):
    """Which provider, and how it is treated."""

    backend: str = "local"
    """Name of the sandbox backend."""
    starting: int = Field(4, gt=0)
    """How many sandboxes may come up at the same time."""
    create_timeout_s: float = Field(30.0, gt=0)
    """Deadline of one creation."""
    destroy_timeout_s: float = Field(30.0, gt=0)
    """Deadline of one destruction."""
    create_retries: int = Field(2, ge=0)
    """How often a retryable creation failure is tried again."""
    allow_unisolated: bool = False
    """Run plain processes where this host cannot isolate. The agent then sees this machine."""


class SandboxPool:
    """Hands out sandboxes and takes every one of them back, whatever happens in between."""

    def __init__(self, backend: Backend, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.counters: Counter[str] = Counter()
        self._backend = backend
        self._starting = asyncio.Semaphore(self.config.starting)
        self._live: dict[str, Sandbox] = {}
        self._background: set[asyncio.Task[Any]] = set()

    async def start(self) -> Capabilities:
        """Check the host and clear what earlier runs left. Raises SandboxUnavailable."""
        capabilities = await self._backend.probe()
        self.counters["reaped"] += await self._backend.reap()
        return capabilities

    @contextlib.asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A fresh sandbox, destroyed at the end also when the caller is cancelled."""
        sandbox = await self._create(spec)
        try:
            yield sandbox
        finally:
            await asyncio.shield(self._spawn(self._destroy(sandbox)))

    async def close(self) -> None:
        """Destroy everything that is alive, wait for what is under way, reap."""
        for sandbox in list(self._live.values()):
            self._spawn(self._destroy(sandbox))
        if self._background:
            await asyncio.wait(set(self._background), timeout=self.config.create_timeout_s)
        while self._background:  # a provider that hangs: its tasks clean up when they are cancelled
            for task in self._background:
                task.cancel()
            await asyncio.wait(set(self._background), timeout=self.config.destroy_timeout_s)
        self.counters["reaped"] += await self._backend.reap()

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        for attempt in range(self.config.create_retries + 1):
            try:
                return await self._create_once(spec)
            except SandboxError as error:
                self.counters["create_failed"] += 1
                if not error.retryable or attempt == self.config.create_retries:
                    raise
                await asyncio.sleep(random.uniform(0.5, 1.5) * 0.1 * 2**attempt)
        raise AssertionError("the loop returns or raises")

    async def _create_once(self, spec: SandboxSpec) -> Sandbox:
        async with self._starting:
            began = time.monotonic()
            task = self._spawn(self._backend.create(spec))
            try:
                sandbox: Sandbox = await asyncio.wait_for(asyncio.shield(task), self.config.create_timeout_s)
            except TimeoutError as error:
                self._discard_later(task)
                raise SandboxCreateFailed(
                    f"no sandbox after {self.config.create_timeout_s} s; the host may be overloaded "
                    "(sandbox.create_timeout_s, sandbox.starting)"
                ) from error
            except asyncio.CancelledError:
                self._discard_later(task)
                raise
        self.counters["created"] += 1
        self.counters["create_ms"] += int(1000 * (time.monotonic() - began))
        self._live[sandbox.id] = sandbox
        return sandbox

    def _discard_later(self, task: "asyncio.Task[Sandbox]") -> None:
        """A creation nobody waits for any more: let it finish, then destroy what it made."""

        async def discard() -> None:
            with contextlib.suppress(SandboxError, asyncio.CancelledError):
                await self._destroy(await task)

        self._spawn(discard())

    async def _destroy(self, sandbox: Sandbox) -> None:
        self._live.pop(sandbox.id, None)
        try:
            await asyncio.wait_for(sandbox.destroy(), self.config.destroy_timeout_s)
            self.counters["destroyed"] += 1
        except (SandboxError, TimeoutError) as error:
            self.counters["destroy_failed"] += 1
            log.warning("sandbox %s could not be destroyed now (%s); the reaper will try again", sandbox.id, error)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

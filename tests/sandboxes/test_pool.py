import asyncio

import pytest

from miles.errors import SandboxCreateFailed, SandboxError
from miles.processes import owner_tag
from miles.sandboxes.base import Capabilities, SandboxSpec
from miles.sandboxes.local import LocalBackend
from miles.sandboxes.pool import SandboxConfig, SandboxPool
from miles.sandboxes.reaper import processes_with


class Machine:
    def __init__(self, number):
        self.id = str(number)
        self.destroyed = 0

    async def destroy(self):
        self.destroyed += 1


class Provider:
    """A backend whose creations wait for `go` and fail as told."""

    name = "provider"

    def __init__(self, failures=()):
        self.failures, self.made, self.starting, self.most = list(failures), [], 0, 0
        self.go = asyncio.Event()
        self.go.set()

    async def probe(self):
        return Capabilities(isolation="none", network_none=False, limits="none")

    async def create(self, spec):
        self.starting += 1
        self.most = max(self.most, self.starting)
        try:
            await self.go.wait()
            if self.failures:
                raise self.failures.pop(0)
            self.made.append(Machine(len(self.made)))
            return self.made[-1]
        finally:
            self.starting -= 1

    async def reap(self):
        return 0


async def test_a_sandbox_is_destroyed_once_whatever_happens_inside():
    provider = Provider()
    pool = SandboxPool(provider)
    with pytest.raises(RuntimeError):
        async with pool.sandbox(SandboxSpec()):
            raise RuntimeError
    await pool.close()
    assert [m.destroyed for m in provider.made] == [1]


async def test_a_retryable_failure_is_tried_again_and_counted():
    provider = Provider([SandboxCreateFailed("busy"), SandboxCreateFailed("busy")])
    pool = SandboxPool(provider)
    async with pool.sandbox(SandboxSpec()):
        assert pool.counters["create_failed"] == 2
    await pool.close()


async def test_a_final_failure_is_not_tried_again():
    pool = SandboxPool(Provider([SandboxError("no quota")]))
    with pytest.raises(SandboxError, match="no quota"):
        async with pool.sandbox(SandboxSpec()):
            pass
    assert pool.counters["create_failed"] == 1


async def test_cancelling_a_creation_destroys_what_comes_of_it():
    provider = Provider()
    provider.go.clear()
    pool = SandboxPool(provider)
    task = asyncio.create_task(pool.sandbox(SandboxSpec()).__aenter__())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    provider.go.set()
    await pool.close()
    assert [m.destroyed for m in provider.made] == [1]


async def test_a_creation_that_takes_too_long_fails_and_leaves_nothing():
    provider = Provider()
    provider.go.clear()
    pool = SandboxPool(provider, SandboxConfig(create_timeout_s=0.05, create_retries=0))
    with pytest.raises(SandboxCreateFailed, match=r"no sandbox after 0\.05 s"):
        async with pool.sandbox(SandboxSpec()):
            pass
    provider.go.set()
    await pool.close()
    assert [m.destroyed for m in provider.made] == [1]


async def test_only_so_many_start_at_once():
    provider = Provider()
    pool = SandboxPool(provider, SandboxConfig(starting=3))

    async def use():
        async with pool.sandbox(SandboxSpec()):
            await asyncio.sleep(0)

    await asyncio.gather(*(use() for _ in range(20)))
    await pool.close()
    assert provider.most <= 3
    assert pool.counters["destroyed"] == 20


async def test_many_real_sandboxes_cancelled_at_random_leave_nothing():
    pool = SandboxPool(LocalBackend())
    await pool.start()

    async def use(number):
        async with pool.sandbox(SandboxSpec()) as sandbox:
            await sandbox.exec("sleep 20 & true")

    tasks = [asyncio.create_task(use(n)) for n in range(24)]
    for number, task in enumerate(tasks):
        await asyncio.sleep(0.002 * (number % 5))
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.close()
    assert processes_with(f"MILES_OWNER={owner_tag()}") == []

import asyncio
import time

import pytest

from miles.errors import ConfigError, SandboxCreateFailed, SandboxError
from miles.processes import owner_mark
from miles.sandboxes.base import Capabilities, Image, SandboxSpec
from miles.sandboxes.local.backend import LocalBackend
from miles.sandboxes.local.reaper import processes_with
from miles.sandboxes.pool import SandboxConfig, SandboxPool, image_of, make_backend


class Machine:
    def __init__(self, number, spec):
        self.id, self.spec, self.destroyed = str(number), spec, 0

    async def adopt(self, spec):
        self.spec = spec

    async def snapshot(self):
        return Image(ref=f"of-{self.id}")

    async def destroy(self):
        self.destroyed += 1


class Provider:
    """A backend whose creations wait for `go` and fail as told."""

    name = "provider"

    def __init__(self, failures=()):
        self.failures, self.made, self.starting, self.most = list(failures), [], 0, 0
        self.prepared, self.broken_images, self.reaped, self.closed = [], [], 0, 0
        self.go = asyncio.Event()
        self.go.set()

    async def probe(self):
        return Capabilities(isolation="none", network_none=False, limits="none", images=("ref", "rootfs", "dockerfile"))

    async def create(self, spec):
        self.starting += 1
        self.most = max(self.most, self.starting)
        try:
            await self.go.wait()
            if self.failures:
                raise self.failures.pop(0)
            self.made.append(Machine(len(self.made), spec))
            return self.made[-1]
        finally:
            self.starting -= 1

    async def reap(self):
        self.reaped += 1
        return 0

    async def prepare(self, image):
        self.prepared.append(image.ref)
        await asyncio.sleep(0.05)
        if self.broken_images:
            raise SandboxError(self.broken_images.pop())

    async def close(self):
        self.closed += 1


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
    assert processes_with(f"MILES_OWNER={owner_mark()}") == []


async def test_only_so_many_are_alive_and_the_others_wait():
    provider = Provider()
    pool = SandboxPool(provider, SandboxConfig(most=2, starting=8))
    alive = most = 0

    async def use():
        nonlocal alive, most
        async with pool.sandbox(SandboxSpec()):
            alive += 1
            most = max(most, alive)
            await asyncio.sleep(0)
            alive -= 1

    await asyncio.gather(*(use() for _ in range(9)))
    assert (most, len(provider.made)) == (2, 9)
    provider.failures = [SandboxError("full")]  # one that was not made takes no room
    with pytest.raises(SandboxError):
        await use()
    await asyncio.gather(use(), use())
    await pool.close()
    assert provider.closed == 1


async def test_creations_are_asked_for_at_a_rate():
    pool = SandboxPool(Provider(), SandboxConfig(per_minute=1200))  # one in 50 ms
    began = time.monotonic()

    async def use():
        async with pool.sandbox(SandboxSpec()):
            pass

    await asyncio.gather(*(use() for _ in range(4)))
    assert time.monotonic() - began >= 0.15
    await pool.close()


async def test_an_image_is_prepared_once_however_many_wait_and_again_after_a_failure():
    provider = Provider()
    provider.broken_images = ["the registry is away"]
    pool = SandboxPool(provider)
    spec = SandboxSpec(image=Image(ref="a"))

    async def use(wanted):
        async with pool.sandbox(wanted):
            pass

    found = await asyncio.gather(*(use(spec) for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in found] == ["the registry is away"] * 3
    await asyncio.gather(*(use(spec) for _ in range(5)), use(SandboxSpec(image=Image(ref="b"))))
    assert sorted(provider.prepared) == ["a", "a", "b"]
    await pool.close()


async def test_sandboxes_made_ahead_are_of_the_same_kind_and_used_once():
    provider = Provider()
    pool = SandboxPool(provider, SandboxConfig(warm=2, image="base"))
    specs = [SandboxSpec(files={"/a": str(n).encode()}, env={"N": str(n)}, labels={"n": str(n)}) for n in range(4)]
    async with pool.sandbox(specs[0]):
        while len(provider.made) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    for spec in specs[1:3]:
        async with pool.sandbox(spec) as machine:
            assert machine.spec.files == spec.files
            assert machine.spec.env == spec.env
            assert machine.id != "0"
        await asyncio.sleep(0.01)
    async with pool.sandbox(SandboxSpec(network="none", workdir="/other")) as machine:
        assert machine.spec.workdir == "/other"
    metrics = pool.metrics()
    assert metrics["sandbox/warm"] == 2
    await pool.close()
    assert {machine.destroyed for machine in provider.made} == {1}
    assert {machine.spec.image.ref for machine in provider.made} == {"base"}


async def test_forks_begin_where_a_sandbox_is_all_or_none():
    provider = Provider()
    pool = SandboxPool(provider, SandboxConfig(create_retries=0))
    async with pool.sandbox(SandboxSpec()) as machine:
        forks = await pool.fork(machine, SandboxSpec(files={"/a": b"x"}), 3)
        assert [(fork.spec.image.ref, dict(fork.spec.files)) for fork in forks] == [("of-0", {})] * 3
        for fork in forks:
            await pool.give_back(fork)
        provider.failures = [SandboxError("full")]
        with pytest.raises(SandboxError, match="full"):
            await pool.fork(machine, SandboxSpec(), 3)
    await pool.close()
    assert {machine.destroyed for machine in provider.made} == {1}


async def test_what_dead_owners_leave_is_looked_for_again_and_again():
    provider = Provider()
    pool = SandboxPool(provider, SandboxConfig(reap_every_s=0.01))
    await pool.start()
    while provider.reaped < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await pool.close()


def test_images_are_named_in_one_word(tmp_path):
    assert image_of("") is None
    assert image_of("python:3.12-slim") == Image(ref="python:3.12-slim")
    assert image_of(f"rootfs:{tmp_path}") == Image(rootfs=tmp_path)
    assert image_of(f"dockerfile:{tmp_path}").kind == "dockerfile"
    with pytest.raises(ValueError, match="not \\['ref', 'snapshot'\\]"):
        Image(ref="a", snapshot="b").digest()


def test_a_build_folder_has_another_digest_when_anything_in_it_changes(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM scratch")
    (tmp_path / "run").write_text("x")
    image = Image(dockerfile=tmp_path)
    seen = {image.digest()}
    (tmp_path / "run").chmod(0o755)
    seen.add(image.digest())
    (tmp_path / "run").write_text("y")
    seen.add(image.digest())
    (tmp_path / "link").symlink_to("run")
    seen.add(image.digest())
    assert len(seen) == 4
    assert image.digest() in seen


def test_a_backends_own_settings_are_checked():
    backend = make_backend(SandboxConfig(backend="e2b", settings={"template": "t"}))
    assert backend.config.template == "t"
    with pytest.raises(ConfigError, match=r"sandbox\.settings do not fit the backend 'docker'"):
        make_backend(SandboxConfig(backend="docker", settings={"colour": "red"}))
    with pytest.raises(ConfigError, match="do not fit the backend 'local'"):
        make_backend(SandboxConfig(settings={"colour": "red"}))


async def test_what_could_not_be_destroyed_is_tried_again_and_keeps_nobody_waiting():
    provider = Provider()
    pool = SandboxPool(provider, SandboxConfig(most=1))
    async with pool.sandbox(SandboxSpec()) as machine:
        destroy, machine.destroy = machine.destroy, None  # not even an error of ours
    async with pool.sandbox(SandboxSpec()):
        machine.destroy = destroy
    assert machine.destroyed == 0
    await pool.close()
    assert {one.destroyed for one in provider.made} == {1}


async def test_sandboxes_made_ahead_make_room_for_an_episode():
    pool = SandboxPool(Provider(), SandboxConfig(most=2, warm=2))
    async with asyncio.timeout(10):
        for n in range(6):
            async with pool.sandbox(SandboxSpec(workdir=f"/w{n}")):
                await asyncio.sleep(0.01)
    await pool.close()

"""Sandboxes side by side: episodes of one creation, three commands and one destruction, many at once.

    python -m benchmarks.sandbox_churn [BACKEND …] [--at 1 16 50] [--episodes 50] [--image dockerfile:FOLDER]
    python -m benchmarks.sandbox_churn --kills 20 [--episodes 1000]

Prints, for every backend and concurrency, episodes per second and the median and 99th percentile of one episode in
milliseconds, and what one command costs through the process inside against a process of the provider's own (docker
exec, nsenter). With `--kills`, drivers that run such episodes are killed (SIGKILL) at random moments; after one reaping
nothing of them may be left: no process, mount, control group or folder.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from miles.sandboxes.base import Backend, SandboxSpec
from miles.sandboxes.inside.machine import MachineSandbox
from miles.sandboxes.local.backend import LocalBackend
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend


async def episode(pool: SandboxPool) -> float:
    """Seconds of one."""
    began = time.monotonic()
    async with pool.sandbox(SandboxSpec(files={"/workspace/task": b"do it"})) as sandbox:
        for command in ("cat task", "echo done > answer", "cat answer"):
            result = await sandbox.exec(command)
            assert result.exit_code == 0, result
    return time.monotonic() - began


async def churn(name: str, image: str, at: int, episodes: int) -> float:
    """One line; episodes per second."""
    config = SandboxConfig(backend=name, image=image, starting=min(at, 16), create_timeout_s=120)
    pool = SandboxPool(make_backend(config), config)
    await pool.start()
    await episode(pool)  # the image is there, the clients are open
    turn = asyncio.Semaphore(at)

    async def one() -> float:
        async with turn:
            return await episode(pool)

    began = time.monotonic()
    times = sorted(await asyncio.gather(*(one() for _ in range(episodes))))
    rate = episodes / (time.monotonic() - began)
    await pool.close()
    late = times[min(len(times) - 1, int(0.99 * len(times)))]
    print(
        f"{name:8} at {at:3}: {rate:7.1f} episodes/s, median {1000 * statistics.median(times):8.1f} ms, "
        f"99 % {1000 * late:8.1f} ms",
        flush=True,
    )
    return rate


async def commands(name: str, image: str, count: int = 30) -> None:
    """What one command costs, both ways, in turn."""
    config = SandboxConfig(backend=name, image=image)
    backend: Backend = make_backend(config)
    pool = SandboxPool(backend, config)
    await pool.start()
    async with pool.sandbox(SandboxSpec()) as sandbox:
        assert isinstance(sandbox, MachineSandbox)
        through: list[float] = []
        own: list[float] = []
        for _ in range(3):  # in blocks: an engine is busy for a while after a process of its own
            await asyncio.sleep(1.0)
            for times, run in ((through, sandbox.exec), (own, sandbox._machine.run)):
                for _ in range(count // 3):
                    began = time.monotonic()
                    await run(["true"], timeout_s=30.0)
                    times.append(time.monotonic() - began)
    await pool.close()
    inside, outside = statistics.median(through), statistics.median(own)
    print(
        f"{name:8} one command: {1000 * inside:.2f} ms through the process inside, {1000 * outside:.1f} ms as one of "
        f"its own: {outside / inside:.1f}x",
        flush=True,
    )


DRIVER = """
import asyncio, sys
from benchmarks.sandbox_churn import episode
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend
async def main():
    config = SandboxConfig(starting=8)
    pool = SandboxPool(make_backend(config), config)
    await pool.start()
    async def forever():
        while True:
            await episode(pool)
            print("episode", flush=True)
    await asyncio.gather(*(forever() for _ in range(8)))
asyncio.run(main())
"""


def traces() -> dict[str, int]:
    """What sandboxes of drivers that are dead may leave on this machine."""
    processes = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            processes += b"MILES_OWNER=" in path.read_bytes()
        except OSError:
            continue
    groups = [folder for root in LocalBackend()._cgroups for folder in root.glob("*.*") if folder.is_dir()]
    folders = list(Path(tempfile.gettempdir()).glob("miles-layer-*")) + list(Path("/dev/shm").glob("miles-sandbox-*"))
    mounts = Path("/proc/self/mounts").read_text().count("miles-")
    return {"processes": processes, "control groups": len(groups), "folders": len(folders), "mounts": mounts}


def kill_drivers(kills: int, episodes: int) -> bool:
    """Whether nothing was left."""
    before, done, dice = traces(), 0, random.Random(0)
    for number in range(kills):
        driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, cwd=Path.cwd())
        assert driver.stdout is not None
        wanted = episodes // kills
        for _ in range(wanted):
            driver.stdout.readline()
        done += wanted
        time.sleep(dice.uniform(0, 0.3))
        driver.kill()
        driver.wait()
        driver.stdout.close()
        print(f"\r{done} episodes, {number + 1} drivers killed", end="", flush=True)
    asyncio.run(LocalBackend().reap())
    for _ in range(50):  # what was killed needs a moment to vanish
        left = traces()
        if left == before:
            break
        time.sleep(0.1)
    print(f"\nleft after one reaping: {left}")
    return left == before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=["local"])
    parser.add_argument("--at", type=int, nargs="+", default=[1, 16, 50])
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--image", default="", help="for backends that need one")
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    if options.kills:
        sys.exit(not kill_drivers(options.kills, options.episodes or 1000))
    rates: dict[int, dict[str, float]] = {}
    for at in options.at:
        for name in options.backends:
            image = "" if name == "local" else options.image
            rates.setdefault(at, {})[name] = asyncio.run(churn(name, image, at, options.episodes or max(20, 2 * at)))
    for name in options.backends:
        asyncio.run(commands(name, "" if name == "local" else options.image))
    for at, found in rates.items():
        for name, rate in found.items():
            if name != "local" and "local" in found:
                print(f"at {at}: local does {found['local'] / rate:.1f} times as many episodes as {name}")


if __name__ == "__main__":
    main()

"""Steps of an environment through a worker against the same adapter in this process; what adding an environment costs.

    python -m benchmarks.env_workers [--id FrozenLake-v1] [--steps 2000] [--add gymnasium:Taxi-v4]

Both sides play the same episodes with the same actions, in turn, several times. "Overhead" is the difference of the
medians of one step with one episode in flight. `--add` adds an environment to an empty project twice: the second time
its packages are cached.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from miles.envs.base import Taskset
from miles.envs.gymnasium import GymnasiumConfig, GymnasiumTaskset
from miles.envs.hub.manage import add
from miles.envs.hub.project import Project
from miles.envs.workers.taskset import WorkerConfig, WorkerTaskset

IN_FLIGHT = (1, 16, 128)
ROUNDS = 3


async def play(taskset: Taskset, episodes: int, steps: int) -> tuple[float, list[float]]:
    """(Steps per second of all episodes together, seconds of each step)."""
    tasks = taskset.tasks("train")
    each = max(1, steps // episodes)
    took: list[float] = []

    async def one(number: int) -> None:
        env = taskset.env(tasks[number % len(tasks)], None)
        await env.reset()
        for step in range(each):
            began = time.perf_counter()
            done = await env.step(str(step % 4))
            took.append(time.perf_counter() - began)
            if done.terminated or done.truncated:
                await env.reset()
        await env.close()

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(episodes)))
    return episodes * each / (time.perf_counter() - began), took


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--id", default="FrozenLake-v1")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--add", default="", metavar="REF")
    options = parser.parse_args()
    here = GymnasiumTaskset(GymnasiumConfig(id=options.id, count=256))
    with tempfile.TemporaryDirectory() as folder:
        settings = {"id": options.id, "count": 256}
        worker = WorkerConfig(
            name="bench", python=Path(sys.executable), kind="gym", settings=settings, log=Path(folder) / "log"
        )
        there = WorkerTaskset(worker)
        there.tasks("train")
        print(f"{options.id}, {options.steps} steps, {ROUNDS} rounds in turn; medians")
        for episodes in IN_FLIGHT:
            rates: dict[str, list[float]] = {"in process": [], "worker": []}
            steps: dict[str, list[float]] = {"in process": [], "worker": []}
            for _ in range(ROUNDS):
                for name, taskset in (("in process", here), ("worker", there)):
                    rate, took = await play(taskset, episodes, options.steps)
                    rates[name].append(rate)
                    steps[name] += took
            local, remote = (statistics.median(rates[name]) for name in rates)
            one, other = (1e3 * statistics.median(steps[name]) for name in steps)
            print(
                f"{episodes:4} in flight: in process {local:8.0f} steps/s, worker {remote:7.0f} "
                f"({remote / local:.2f}x); a step {one:.3f} ms and {other:.3f} ms"
                + (f": overhead {other - one:.3f} ms" if episodes == 1 else ""),
                flush=True,
            )
        await there.close()
    if options.add:
        for attempt in ("first", "again, packages cached"):
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                await asyncio.to_thread(add, Project(Path(folder)), options.add, {}, lambda text: None)
                print(f"miles env add {options.add}, {attempt}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    asyncio.run(main())

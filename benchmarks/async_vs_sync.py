"""Asynchronous against synchronous scheduling when tools are slow now and then: same episodes, same engine, one run.

    python benchmarks/async_vs_sync.py [--steps 12]

Episodes ask a scripted engine through real sessions and wait for simulated tools (log-normal, heavy
tail); the trainer's step is a fixed wait. `bound` is the best any schedule could do: the larger of the
trainer's own time and all episode time divided by the slots.
"""

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from pathlib import Path

from miles.envs.base import Taskset
from miles.envs.vault import VaultTaskset
from miles.recipes.tiny_model import TinyModelConfig, make_tiny_model
from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.episode import EpisodeRunner, GenerateContext
from miles.rollout.rendering.families import load_rendering
from miles.rollout.rendering.rendering import Rendering
from miles.rollout.scheduler import AsyncRollout, RolloutConfig
from miles.rollout.session.server import SessionServer
from miles.rollout.session.session import ChatRequest
from miles.sandboxes.local.backend import LocalBackend
from miles.sandboxes.pool import SandboxPool
from miles.types import Episode, Scored, Task, Weights

TRAIN_S, GROUPS, SIZE, SLOTS, TURNS = 0.4, 4, 4, 16, 3


def tool_sleeps(task: Task, index: int) -> list[float]:
    """Seconds of each tool call: median 60 ms, now and then seconds. The same for both schedules."""
    rng = random.Random(f"{task.id}/{index}")
    return [min(4.0, 0.06 * rng.lognormvariate(0.0, 1.3)) for _ in range(TURNS)]


async def generate(context: GenerateContext) -> Episode:
    """Three turns, a tool wait after each."""
    async with context.session() as session:
        messages = list(context.task.prompt)
        for seconds in tool_sleeps(context.task, context.job.index):
            done = await session.complete(ChatRequest(messages=tuple(messages)))
            done.delivered()
            await asyncio.sleep(seconds)
            messages += [done.message, {"role": "user", "content": "open birch"}]
        return context.episode(session.tree(), Scored(reward=float(context.job.index % 2)))


async def run(rendering: Rendering, steps: int, staleness: int) -> tuple[float, float, float]:
    """(seconds, seconds that the trainer waited, seconds of all tool waits of the trained episodes)."""
    tasks = [Task(id=f"t{n}", prompt=({"role": "user", "content": "open amber"},)) for n in range(1000)]
    engine = ScriptedEngine(lambda request: [*rendering.encode("answer 42"), rendering.stop_ids[0]])
    config = RolloutConfig(groups_per_step=GROUPS, group_size=SIZE, max_episodes=SLOTS, max_staleness=staleness)
    async with SessionServer(engine, rendering, max_tokens=64) as server:
        runner = EpisodeRunner(Taskset(), server, SandboxPool(LocalBackend()), generate)
        rollout = AsyncRollout(tasks, runner, config)
        began, idle, work = time.perf_counter(), 0.0, 0.0
        for step in range(steps):
            waiting = time.perf_counter()
            groups = await rollout.take(GROUPS)
            idle += time.perf_counter() - waiting
            work += sum(episode.timings["total"] for group in groups for episode in group.episodes)
            await asyncio.sleep(TRAIN_S)
            await engine.load(Weights(version=step + 1))
            rollout.advance(step + 1)
        seconds = time.perf_counter() - began
        await rollout.close()
    return seconds, idle, work


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=12)
    steps = options.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        taskset = VaultTaskset()
        messages, tools = next(itertools.islice(taskset.demonstrations(0), 1))
        words = taskset.vocabulary()
        make_tiny_model(Path(folder), TinyModelConfig(), seed=0, words=words, tools=tools, example=messages)
        rendering = load_rendering(Path(folder))
    episodes = steps * GROUPS * SIZE
    print(f"{steps} steps of {GROUPS} groups x {SIZE}, {SLOTS} slots, trainer step {TRAIN_S} s")
    print(f"{'max_staleness':>13} {'seconds':>8} {'episodes/s':>11} {'ratio':>6} {'trainer idle':>13} {'bound':>7}")
    first = None
    for staleness in (0, 1, 2):
        seconds, idle, work = asyncio.run(run(rendering, steps, staleness))
        rate = episodes / seconds
        first = first or rate
        bound = max(steps * TRAIN_S, work / SLOTS)
        share = 100 * idle / seconds
        print(f"{staleness:13} {seconds:8.1f} {rate:11.1f} {rate / first:6.2f} {share:12.0f}% {bound:6.1f}s")


if __name__ == "__main__":
    main()

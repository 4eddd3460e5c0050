"""Held-out evaluation on the engines that also serve training, bound to the version that produced it."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from pydantic import Field

from miles.config import Config
from miles.rollout.episode import EpisodeRunner, Job
from miles.types import Discarded, Episode, Task, WeightVersion

__all__ = ["EvalConfig", "SharedEvaluator"]


class EvalConfig(Config):
    """What is measured, and when."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    tasks: int = Field(100, gt=0)
    """Held-out tasks, the first ones of the split."""
    split: str = "test"
    """Which split."""
    concurrency: int = Field(64, gt=0)
    """Episodes in flight."""


class SharedEvaluator:
    """Runs every task once inside `paused()` (no new training episodes). Discarded ones are retried, then left out."""

    def __init__(
        self,
        tasks: Sequence[Task],
        runner: EpisodeRunner,
        paused: Callable[[], AbstractAsyncContextManager[None]],
        config: EvalConfig | None = None,
        *,
        retries: int = 2,
        on_episode: Callable[[Episode], None] = lambda episode: None,
    ) -> None:
        self.config = config or EvalConfig()
        self._tasks = tasks[: self.config.tasks]
        self._runner, self._paused, self._retries, self._on_episode = runner, paused, retries, on_episode

    async def evaluate(self, version: WeightVersion) -> dict[str, Any]:
        """Mean reward over scored and faulted episodes; `mixed` counts episodes that saw another version."""
        began, slots = time.monotonic(), asyncio.Semaphore(self.config.concurrency)

        async def one(task: Task) -> Episode:
            async with slots:
                for attempt in range(self._retries + 1):
                    episode = await self._runner.run(
                        Job(task=task, group_id=f"eval-v{version}-{task.id}", attempt=attempt)
                    )
                    self._on_episode(episode)
                    if not isinstance(episode.outcome, Discarded):
                        break
                return episode

        async with self._paused():
            running = [asyncio.ensure_future(one(task)) for task in self._tasks]
            try:
                episodes = await asyncio.gather(*running)
            finally:  # after a failure none may go on outside the pause
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        rewards = [e.reward for e in episodes if e.reward is not None]
        other = [e for e in episodes if any(set(t.versions) - {version} for t in e.tree.turns)]
        return {
            "version": version,
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "episodes": len(rewards),
            "outcomes": dict(Counter(e.outcome.kind for e in episodes)),
            "mixed": len(other),
            "seconds": time.monotonic() - began,
        }

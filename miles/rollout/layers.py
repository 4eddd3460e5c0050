"""The rollout layer: anything with `groups()` can feed the trainer."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from miles.errors import RunError
from miles.types import Episode, Group, WeightVersion

__all__ = ["Rollout", "RolloutSource"]


class Rollout(Protocol):
    """A producer of groups of its own making (self-play, another framework's loop)."""

    def groups(self) -> AsyncIterator[Group]: ...


class RolloutSource:
    """A GroupSource over a Rollout. Its cursor counts groups: the producer must be able to skip."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        state: dict[str, Any] | None = None,
        on_episode: Callable[[Episode], None] = lambda episode: None,
    ) -> None:
        self._on_episode = on_episode
        self._counts: Counter[str] = Counter()
        self._groups = rollout.groups()
        self._skip = int(state["taken"]) if state else 0
        self._taken = self._skip
        self._handed = 0
        self.version: WeightVersion = 0

    async def take(self, n: int) -> list[Group]:
        taken: list[Group] = []
        async for group in self._groups:
            if self._skip:
                self._skip -= 1
                continue
            taken.append(group)
            self._record(group)
            if len(taken) == n:
                self._handed = n
                return taken
        raise RunError(
            f"the rollout ended with {len(taken)} of {n} groups for a step; make groups() endless or ask less"
        )

    def trained(self) -> None:
        self._taken, self._handed = self._taken + self._handed, 0

    def advance(self, version: WeightVersion) -> None:
        self.version = version

    def _record(self, group: Group) -> None:
        for episode in group.episodes:
            self._counts[f"outcome/{episode.outcome.kind}"] += 1
            self._counts["sampled_tokens"] += episode.tree.sampled_tokens
            self._on_episode(episode)

    def counters(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return {name: float(count) for name, count in counts.items()}

    def now(self) -> dict[str, float]:
        """What is going on at this moment: the producer does not tell."""
        return {"groups_taken": float(self._taken)}

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Evaluation may run beside the producer: it alone decides what it begins."""
        yield

    async def close(self) -> None:
        """End the producer's generator."""
        if isinstance(self._groups, AsyncGenerator):
            await self._groups.aclose()

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken}

"""Which episode runs next. A finished episode frees its slot at once; staleness is bounded by admission.

Admission (AReaL, arXiv 2505.24298, eq. 3): with B groups per step, engines at version v and bound h,
at most (v + h + 1) * B groups are ever admitted, so no group is begun that would be too old when its
turn to train comes. What is too old all the same (a straggler) is retried, kept or dropped by policy.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field

from miles.config import Config
from miles.errors import RunError
from miles.rollout.episode import EpisodeRunner, Job
from miles.types import Discarded, Episode, Group, Task, WeightVersion

__all__ = ["AsyncRollout", "RolloutConfig"]

log = logging.getLogger(__name__)


class RolloutConfig(Config):
    """How episodes are scheduled and which groups reach the trainer."""

    name: str = "async"
    """Rollout layer: registry name, or module:attr of a class with groups(), made as `cls(runner, tasks)`."""
    groups_per_step: int = Field(16, gt=0)
    """Groups that one optimizer step consumes."""
    group_size: int = Field(8, gt=0)
    """Sibling episodes of one task."""
    max_episodes: int = Field(64, gt=0)
    """Episodes in flight at most."""
    max_staleness: int = Field(1, ge=0)
    """Versions that trained tokens may lag behind; 0 is strictly on-policy and synchronous."""
    retries: int = Field(2, ge=0)
    """Fresh attempts after a discarded episode."""
    min_group: int = Field(2, gt=0)
    """A group with fewer usable episodes is dropped."""
    on_stale: Literal["retry", "keep", "drop"] = "retry"
    """What happens to a finished group that is older than max_staleness."""
    drop_without_difference: bool = False
    """Whether groups whose rewards are all equal are replaced by the next tasks' (DAPO's dynamic sampling)."""
    discard_limit: int = Field(64, gt=0)
    """Episodes that no retry saved, or groups that are too old, in a row after which the run stops."""


@dataclass
class _Open:
    """A group whose episodes are not all done."""

    seq: int
    round: int
    left: int
    episodes: list[Episode] = field(default_factory=list)


class AsyncRollout:
    """A GroupSource over tasks. `on_episode` sees every finished episode, discarded ones included.

    `life` counts how often the run was resumed: it keeps group names unique over a run's lives.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        runner: EpisodeRunner,
        config: RolloutConfig | None = None,
        *,
        seed: int = 0,
        version: WeightVersion = 0,
        state: dict[str, Any] | None = None,
        life: int = 0,
        on_episode: Callable[[Episode], None] = lambda episode: None,
    ) -> None:
        if not tasks:
            raise RunError("the taskset has no training tasks")
        self.config = config or RolloutConfig()
        self._tasks, self._runner, self._on_episode = tasks, runner, on_episode
        self._version, self._life, self._seed = version, life, seed
        self._next = int(state["next"]) if state else 0
        self._again: deque[int] = deque(state["pending"] if state else ())
        self._admitted = version * self.config.groups_per_step
        self._jobs: deque[Job] = deque()
        self._open: dict[str, _Open] = {}
        self._ready: deque[Group] = deque()
        self._rounds: Counter[int] = Counter()
        self._running: set[asyncio.Task[None]] = set()
        self._wake, self._news = asyncio.Event(), asyncio.Event()
        self._paused = 0
        self._closing = False
        self._handed: list[Group] = []  # given to the trainer, not yet confirmed by a new version
        self._counts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._discarded_in_a_row = 0
        self._stale_in_a_row = self._replaced_in_a_row = 0
        self._fatal: BaseException | None = None
        self._pump: asyncio.Task[None] | None = None
        if state:
            self._restore(state)

    def start(self) -> None:
        """Begin to admit groups; the first take() does it too."""
        if self._pump is not None:
            return
        self._pump = asyncio.create_task(self._run_pump())

    async def close(self) -> None:
        """Cancel every episode; their sandboxes and sessions are cleaned up before this returns."""
        self._closing = True
        tasks = [*self._running, *([self._pump] if self._pump else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Begin no new episode inside the block; those in flight go on."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            self._wake.set()

    async def take(self, n: int) -> list[Group]:
        """Wait for `n` groups in the order they finished. Raises what made going on impossible."""
        self.start()
        taken: list[Group] = []
        try:
            while True:
                if self._fatal is not None:
                    raise self._fatal
                while self._ready and len(taken) < n:
                    group = self._ready.popleft()
                    if self._fresh(group):
                        taken.append(group)
                if len(taken) == n:
                    self._handed = taken.copy()
                    return taken
                self._news.clear()
                await self._news.wait()
        except BaseException:
            self._ready.extendleft(reversed(taken))
            raise

    def trained(self) -> None:
        self._handed = []

    def advance(self, version: WeightVersion) -> None:
        self._version = version
        self._wake.set()

    def counters(self) -> dict[str, float]:
        """Counts since the last call, and what is in flight now."""
        counts, self._counts = self._counts, Counter()
        return {**{name: float(count) for name, count in counts.items()}, **self._runner.metrics(), **self.now()}

    def now(self) -> dict[str, float]:
        """What is going on at this moment."""
        return {
            "in_flight": float(len(self._running)),
            "buffered_groups": float(len(self._ready)),
            **self._totals,
        }

    def state(self) -> dict[str, Any]:
        """Next task of the order, the admitted ones that must be run again, and what was finished of them.

        Finished groups are kept whole, unfinished ones as the episodes that are done; both come back in a resumed run.
        """
        half_done = [
            Group(id=group_id, seq=o.seq, task_id=o.episodes[0].task_id, episodes=tuple(o.episodes))
            for group_id, o in self._open.items()
            if o.episodes
        ]
        pending = [*(o.seq for o in self._open.values() if not o.episodes), *self._again]
        return {
            "next": self._next,
            "pending": sorted(pending),
            "unfinished": [group.id for group in half_done],
            "groups": [*self._handed, *self._ready, *half_done],
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` kept: finished groups wait for the trainer, the rest of the others is run."""
        unfinished = set(state.get("unfinished", ()))
        for group in state.get("groups", ()):
            self._admitted += 1
            self._rounds[group.seq] += 1
            if group.id not in unfinished:
                self._ready.append(group)
                continue
            task = self._task(group.seq)
            if task.id != group.task_id:
                log.warning("the order of tasks changed: %s is begun again as %s", group.task_id, task.id)
                self._release(group.seq, again=True)
                continue
            done = {episode.index for episode in group.episodes}
            missing = [index for index in range(self.config.group_size) if index not in done]
            self._open[group.id] = _Open(
                seq=group.seq, round=self._rounds[group.seq], left=len(missing), episodes=list(group.episodes)
            )
            self._jobs.extend(Job(task=task, group_id=group.id, index=index) for index in missing)
            if not missing:  # resumed with smaller groups
                self._close_group(group.id)

    def _fresh(self, group: Group) -> bool:
        oldest = min((e.tree.oldest_version for e in group.episodes if e.tree.oldest_version is not None), default=None)
        if oldest is None or self._version - oldest <= self.config.max_staleness or self.config.on_stale == "keep":
            self._stale_in_a_row = 0
            return True
        self._stale_in_a_row += 1
        if self._stale_in_a_row >= self.config.discard_limit:
            self._again.append(group.seq)
            raise RunError(
                f"{self._stale_in_a_row} groups in a row were too old (version {oldest} at {self._version}): episodes "
                "take longer than the steps allow; raise rollout.max_staleness, or set rollout.on_stale=keep"
            )
        retry = self.config.on_stale == "retry" and self._rounds[group.seq] <= self.config.retries
        self._counts["stale_retried" if retry else "stale_dropped"] += 1
        self._release(group.seq, again=retry)
        return False

    def _release(self, seq: int, *, again: bool) -> None:
        """Give an admission back, for the same task or for the next one."""
        self._admitted -= 1
        if again:
            self._again.append(seq)
        self._wake.set()

    async def _run_pump(self) -> None:
        try:
            while True:
                self._wake.clear()
                while len(self._running) < self.config.max_episodes and (job := self._next_job()) is not None:
                    task = asyncio.create_task(self._run(job))
                    self._running.add(task)
                    task.add_done_callback(self._ended)
                await self._wake.wait()
        except Exception as error:  # noqa: BLE001  handed to whoever waits in take()
            self._fail(error)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._wake.set()
        if task.cancelled():
            if not self._closing:
                self._fail(RunError("an episode's task was cancelled from within; see the log"))
        elif (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._news.set()

    def _next_job(self) -> Job | None:
        if self._paused or self._fatal is not None:
            return None
        if not self._jobs and self._may_admit():
            self._admit()
        return self._jobs.popleft() if self._jobs else None

    def _may_admit(self) -> bool:
        return self._admitted < (self._version + self.config.max_staleness + 1) * self.config.groups_per_step

    def _admit(self) -> None:
        if self._again:
            seq = self._again.popleft()
        else:
            seq, self._next = self._next, self._next + 1
        self._admitted += 1
        self._rounds[seq] += 1
        group_id = f"g{seq:06d}" + (f"r{self._rounds[seq]}" if self._rounds[seq] > 1 else "")
        group_id += f"l{self._life}" if self._life else ""
        task = self._task(seq)
        self._open[group_id] = _Open(seq=seq, round=self._rounds[seq], left=self.config.group_size)
        self._jobs.extend(Job(task=task, group_id=group_id, index=i) for i in range(self.config.group_size))

    def _task(self, seq: int) -> Task:
        """The same order for the same seed, however the run was interrupted: one shuffle per epoch."""
        epoch, place = divmod(seq, len(self._tasks))
        if getattr(self, "_epoch", None) != epoch:
            order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._epoch, self._order = epoch, order
        return self._tasks[self._order[place]]

    async def _run(self, job: Job) -> None:
        episode = await self._runner.run(job)
        outcome = episode.outcome
        self._counts[f"outcome/{outcome.kind}"] += 1
        self._totals[f"total/{outcome.kind}"] += 1
        self._counts["sampled_tokens"] += sum(one.tree.sampled_tokens for one in (episode, *episode.seats))
        self._on_episode(episode)
        if isinstance(outcome, Discarded):
            self._counts[f"discarded/{outcome.reason}"] += 1
            if job.attempt < self.config.retries:
                again = Job(task=job.task, group_id=job.group_id, index=job.index, attempt=job.attempt + 1)
                self._jobs.appendleft(again)
                return
            self._give_up(outcome)
        else:
            self._discarded_in_a_row = 0
        self._finish(job.group_id, episode)

    def _give_up(self, outcome: Discarded) -> None:
        """An episode that no retry could save; too many of them in a row mean that nothing works any more."""
        self._discarded_in_a_row += 1
        if self._discarded_in_a_row >= self.config.discard_limit:
            raise RunError(
                f"{self._discarded_in_a_row} episodes in a row were discarded, last for {outcome.reason!r}: "
                f"{outcome.detail[-500:]}. Mend the cause and go on with `miles launch --resume RUN`"
            )

    def _finish(self, group_id: str, episode: Episode) -> None:
        group = self._open[group_id]
        group.left -= 1
        group.episodes.append(episode)
        if not group.left:
            self._close_group(group_id)

    def _close_group(self, group_id: str) -> None:
        """All episodes are done: the group is ready, or dropped, or replaced."""
        group = self._open.pop(group_id)
        usable = sorted((e for e in group.episodes if e.reward is not None), key=lambda e: e.index)
        if len(usable) < min(self.config.min_group, self.config.group_size):
            self._counts["groups_dropped"] += 1
            self._release(group.seq, again=False)
            return
        self._counts["groups_finished"] += 1
        done = Group(id=group_id, seq=group.seq, task_id=usable[0].task_id, episodes=tuple(_with_seats(usable)))
        if self.config.drop_without_difference and done.without_difference:
            self._counts["groups_replaced"] += 1
            self._replaced_in_a_row += 1
            self._release(group.seq, again=False)
            if self._replaced_in_a_row >= self.config.discard_limit:
                raise RunError(
                    f"{self._replaced_in_a_row} groups in a row had equal rewards: every task is solved, or none is; "
                    "change the tasks, or set rollout.drop_without_difference=false"
                )
            return
        self._replaced_in_a_row = 0
        self._ready.append(done)
        self._news.set()


def _with_seats(episodes: Sequence[Episode]) -> list[Episode]:
    """Every player's trajectory as an episode of the group."""
    apart = [one for episode in episodes for one in (replace(episode, seats=()), *episode.seats)]
    return [one for one in apart if one.reward is not None]

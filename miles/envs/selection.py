"""Which tasks of an environment a run uses, and the rewards it puts on them: for every taskset alike."""

import random
from collections.abc import Iterator, Mapping, Sequence

from pydantic import Field

from miles.config import Config
from miles.envs.base import Demonstration, Solution, Taskset
from miles.envs.rewards import JudgeConfig, Judges
from miles.errors import ConfigError
from miles.sandboxes.base import Sandbox, SandboxSpec
from miles.types import Env, Observation, Score, Step, Task, Transcript

__all__ = ["SelectedTaskset", "SelectionConfig", "selected"]

ALIASES = {
    "train": ("train", "training"),
    "test": ("test", "eval", "evaluation", "validation", "val", "valid", "dev"),
}


class SelectionConfig(Config):
    """Tasks by split: renamed, ordered, cut."""

    train: str = ""
    """The environment's own name of the split to train on; empty: the usual names."""
    test: str = ""
    """The same for held-out tasks."""
    skip: int = Field(0, ge=0)
    """Training tasks left out at the beginning, after shuffling."""
    take: int | None = Field(None, gt=0)
    """Training tasks at most."""
    take_test: int | None = Field(None, gt=0)
    """Held-out tasks at most."""
    shuffle: int | None = None
    """Seed of an order; None: the environment's own."""
    hold_out: float = Field(0.1, gt=0, lt=1)
    """Share of the tasks that are held out where the environment has one split only."""
    include: tuple[str, ...] = ()
    """Ids of training tasks to use; empty: all."""
    exclude: tuple[str, ...] = ()
    """Ids of tasks to leave out."""


class SelectedTaskset(Taskset):
    """Another taskset with tasks chosen and rewards replaced."""

    def __init__(self, inner: Taskset, selection: SelectionConfig, judges: Judges | None) -> None:
        self.inner, self.selection, self._judges = inner, selection, judges
        self.name, self.on_agent_failure = inner.name, inner.on_agent_failure
        self.harness, self.generation, self.concurrency = inner.harness, inner.generation, inner.concurrency
        self.reward_range = None if judges is not None else inner.reward_range
        self._tasks: dict[str, Sequence[Task]] = {}

    def splits(self) -> Sequence[str]:
        return ("train", "test")

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._tasks:
            self._tasks[split] = self._choose(split)
        return self._tasks[split]

    def _choose(self, split: str) -> Sequence[Task]:
        chosen = self.selection
        tasks = list(self._raw(split))
        known = {task.id for task in tasks}
        if split == "train" and (unknown := [name for name in chosen.include if name not in known]):
            raise ConfigError(f"env {self.name!r} has no task {unknown[0]!r} in its training split")
        tasks = [task for task in tasks if task.id not in chosen.exclude]
        if chosen.shuffle is not None:
            random.Random(f"{chosen.shuffle}/{split}").shuffle(tasks)
        if split == "train":
            tasks = [task for task in tasks if not chosen.include or task.id in chosen.include]
            tasks = tasks[chosen.skip :]
        most = chosen.take if split == "train" else chosen.take_test
        return tasks if most is None else tasks[:most]

    def _raw(self, split: str) -> Sequence[Task]:
        """The inner tasks of a split by our names, or a part of the only split there is."""
        filled = [name for name in self.inner.splits() if self.inner.tasks(name)]
        found = {ours: self._named(ours, filled) for ours in ALIASES}
        if found["train"] and found["train"] == found["test"]:
            raise ConfigError(
                f"env {self.name!r}: env.tasks names {found['train']!r} both to train on and to test with"
            )
        if split in found and all(found.values()):
            return self.inner.tasks(found[split])
        if split in found and len(filled) == 1:
            return self._part(self.inner.tasks(filled[0]), split)
        if split in filled:
            return self.inner.tasks(split)
        raise ConfigError(
            f"env {self.name!r} has no split {split!r}; it has {', '.join(filled) or 'no tasks at all'}: choose "
            "with env.tasks.train and env.tasks.test"
        )

    def _named(self, ours: str, filled: Sequence[str]) -> str:
        """The inner split that stands for one of ours; empty when none does."""
        wish = self.selection.train if ours == "train" else self.selection.test
        if wish and wish not in filled:
            raise ConfigError(f"env {self.name!r} has no split {wish!r}; it has {', '.join(filled)}")
        return wish or next((name for name in ALIASES[ours] if name in filled), "")

    def _part(self, tasks: Sequence[Task], split: str) -> Sequence[Task]:
        if len(tasks) == 1:
            return tasks  # nothing can be held out of one
        order = list(range(len(tasks)))
        random.Random("held out").shuffle(order)
        count = min(len(tasks) - 1, max(1, round(self.selection.hold_out * len(tasks))))
        places = sorted(order[:count] if split == "test" else order[count:])
        return [tasks[place] for place in places]

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        env = self.inner.env(task, sandbox)
        return env if self._judges is None else _JudgedEnv(env, task, self._judges)

    def sandbox(self, task: Task) -> SandboxSpec | None:
        return self.inner.sandbox(task)

    def seconds(self, task: Task) -> Mapping[str, float]:
        return self.inner.seconds(task)

    def vocabulary(self) -> Sequence[str]:
        return self.inner.vocabulary()

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        return self.inner.demonstrations(seed)

    async def random_actions(self, task: Task, count: int) -> list[str]:
        return await self.inner.random_actions(task, count)

    async def solution(self, task: Task) -> Solution | None:
        return await self.inner.solution(task)

    async def close(self) -> None:
        await self.inner.close()


class _JudgedEnv:
    """An Env whose score is the judges'."""

    def __init__(self, env: Env, task: Task, judges: Judges) -> None:
        self._env, self._task, self._judges = env, task, judges

    def __setattr__(self, name: str, value: object) -> None:
        """The episode hands its means to whoever needs them."""
        object.__setattr__(self._env if name == "more_sandboxes" else self, name, value)

    async def reset(self) -> Observation:
        return await self._env.reset()

    async def step(self, action: str) -> Step:
        return await self._env.step(action)

    async def score(self, transcript: Transcript) -> Score:
        return await self._judges(self._task, transcript, await self._env.score(transcript))

    async def close(self) -> None:
        await self._env.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)


def selected(taskset: Taskset, selection: SelectionConfig, parts: Mapping[str, JudgeConfig]) -> Taskset:
    """The taskset itself where nothing is chosen and its splits have our names."""
    if parts and taskset.generation:
        raise ConfigError(f"env {taskset.name!r}: every player has a reward of its own; env.rewards cannot change them")
    plain = selection == SelectionConfig() and not parts
    if plain and {"train", "test"} <= set(taskset.splits()) and taskset.tasks("train") and taskset.tasks("test"):
        return taskset
    return SelectedTaskset(taskset, selection, Judges(parts) if parts else None)

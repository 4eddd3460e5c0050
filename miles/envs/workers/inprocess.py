"""An adapter in this process: no other Python, no socket, the same tasks and texts as in a worker."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from miles.envs.base import BaseEnv, Solution, Taskset
from miles.envs.rewards import as_score
from miles.envs.workers.process import GUEST
from miles.envs.workers.taskset import as_observation, as_solution, as_step, as_task, transcript_told
from miles.errors import ConfigError, EnvError
from miles.sandboxes.base import Sandbox
from miles.types import Env, Observation, Score, Step, Task, Transcript

__all__ = ["AdapterTaskset", "adapter_module"]


def adapter_module(kind: str) -> Any:
    """A module of the guest, imported here. ConfigError when its package is not installed."""
    if str(GUEST) not in sys.path:
        sys.path.append(str(GUEST))
    try:
        return importlib.import_module(f"miles_worker.adapters.{kind}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this environment needs the package {error.name!r} here: pip install it, or give the environment a Python "
            "of its own with `miles env add`"
        ) from error


class AdapterTaskset(Taskset):
    """Tasks and episodes of an adapter whose methods do not block for long."""

    def __init__(self, kind: str, **settings: Any) -> None:
        module = adapter_module(kind)
        self._failure = importlib.import_module("miles_worker.protocol").Failure
        try:
            self.adapter = module.make(settings)
        except self._failure as error:
            raise ConfigError(str(error)) from error
        self._about = self.adapter.about()
        self.name = self._about["name"]

    def splits(self) -> Sequence[str]:
        return tuple(self._about["splits"])

    def tasks(self, split: str) -> Sequence[Task]:
        told = self.adapter.tasks(split, 0, self._about["splits"][split])
        return [as_task(one, split) for one in told]

    async def random_actions(self, task: Task, count: int) -> list[str]:
        drawn: list[str] = self.adapter.random_actions(task.data, task.data.get("seed") or 0, count)
        return drawn

    async def solution(self, task: Task) -> Solution | None:
        told = self.adapter.gold(task.data)
        return None if told is None else as_solution(told)

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        return _AdapterEnv(task, self.adapter, self._failure)


class _AdapterEnv(BaseEnv):
    def __init__(self, task: Task, adapter: Any, failure: type[Exception]) -> None:
        super().__init__(task)
        self._adapter, self._failure = adapter, failure
        self._played: Any = None

    async def reset(self) -> Observation:
        self._played = self._adapter.play(self.task.data, self.task.data.get("seed"))
        return as_observation(self._played.reset(), self.task)

    async def step(self, action: str) -> Step:
        try:
            return as_step(self._played.step(action))
        except self._failure as error:
            raise EnvError(str(error)) from error

    async def score(self, transcript: Transcript) -> Score:
        return as_score(self._played.score(transcript_told(transcript)))

    async def close(self) -> None:
        if self._played is not None:
            self._played.close()

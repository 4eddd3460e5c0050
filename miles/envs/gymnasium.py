"""Gymnasium both ways: a `gymnasium.Env` with discrete or text actions is a taskset, our toy is a gymnasium.Env."""

import asyncio
import math
import string
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

import gymnasium
from pydantic import Field

from miles.config import Config
from miles.envs.base import ACT_TOOL, BaseEnv, Taskset
from miles.envs.toy import GuessNumber, GuessNumberTaskset
from miles.errors import ConfigError, EnvError
from miles.sandboxes.base import Sandbox
from miles.types import Env, Observation, Score, Step, Task, Transcript

__all__ = ["GuessNumberGym", "GymnasiumTaskset", "as_float", "register"]


class GymnasiumConfig(Config):
    """Which registered environment."""

    id: str
    """Gymnasium's name of it, as FrozenLake-v1."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of gymnasium.make."""
    count: int = Field(1024, gt=0)
    """Tasks (seeds) of each split."""


class GymnasiumTaskset(Taskset):
    """Every seed is a task of one environment; actions come as text. `make` builds what has no registered id."""

    config_class = GymnasiumConfig

    def __init__(self, config: GymnasiumConfig, make: Callable[[], "gymnasium.Env[Any, Any]"] | None = None) -> None:
        if make is None:
            try:
                gymnasium.spec(config.id)
            except gymnasium.error.Error as error:
                raise ConfigError(f"gymnasium does not know env.settings.id={config.id}: {error}") from error
        self.name, self._count = config.id, config.count
        self._make = make or (lambda: gymnasium.make(config.id, **config.kwargs))

    def tasks(self, split: str) -> Sequence[Task]:
        offset = 0 if split == "train" else self._count
        return [self._task(split, offset + index) for index in range(self._count)]

    def _task(self, split: str, seed: int) -> Task:
        return Task(id=f"{split}/{seed}", prompt=(), data={"seed": seed}, split=split)

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        return _GymnasiumEnv(task, self._make())


class _GymnasiumEnv(BaseEnv):
    """One episode of a gymnasium.Env; its score is the sum of its rewards."""

    def __init__(self, task: Task, env: "gymnasium.Env[Any, Any]") -> None:
        super().__init__(task)
        self._env, self._total, self._over = env, 0.0, False

    async def reset(self) -> Observation:
        self._total, self._over = 0.0, False
        observation, _ = self._env.reset(seed=self.task.data["seed"])
        space = self._env.action_space
        text = f"Actions: {space}. Take one at a time with the act tool.\nObservation: {observation}"
        return Observation(messages=({"role": "user", "content": text},), tools=(ACT_TOOL,))

    async def step(self, action: str) -> Step:
        if self._over:
            return Step(observation="the episode is over", terminated=True)
        try:
            parsed = _parse_action(self._env.action_space, action)
        except ValueError as error:
            return Step(observation=f"invalid action: {error}")
        observation, reward, terminated, truncated, _ = self._env.step(parsed)
        value = as_float(reward)
        self._total += value
        self._over = bool(terminated or truncated)
        return Step(observation=str(observation), reward=value, terminated=bool(terminated), truncated=bool(truncated))

    async def score(self, transcript: Transcript) -> Score:
        return Score(reward=self._total)

    async def close(self) -> None:
        self._env.close()


def as_float(reward: "SupportsFloat | Any") -> float:
    """A reward as a finite float: 0-d and one-element arrays, numpy scalars, Decimals, bools.

    Raises EnvError for NaN, infinities and anything with more than one element.
    """
    try:
        value = float(reward.item() if hasattr(reward, "item") else reward)
    except (TypeError, ValueError) as error:
        raise EnvError(f"the environment returned {reward!r} as reward; it must be one number") from error
    if not math.isfinite(value):
        raise EnvError(f"the environment returned {value} as reward; it must be finite")
    return value


def _parse_action(space: Any, action: str) -> Any:
    if isinstance(space, gymnasium.spaces.Discrete):
        number = int(action.strip())
        if not space.contains(number):
            raise ValueError(f"{number} is not in {space}")
        return number
    if isinstance(space, gymnasium.spaces.Text):
        if not space.contains(action):
            raise ValueError(f"{action!r} is not in {space}")
        return action
    raise EnvError(f"actions of {space} cannot be written as text; wrap the environment with a Discrete or Text space")


class GuessNumberGym(gymnasium.Env[str, str]):  # type: ignore[misc]  # Any without its stubs
    """Our GuessNumber for anything that speaks Gymnasium."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  Gymnasium declares it so

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Text(max_length=3, min_length=1, charset=string.digits)
        self.observation_space = gymnasium.spaces.Text(max_length=80, charset=string.printable)
        self._taskset = GuessNumberTaskset()
        self._env: GuessNumber | None = None
        self.render_mode = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        task = self._taskset.task("train", int(self.np_random.integers(1 << 30)))
        self._env = GuessNumber(task)
        observation = asyncio.run(self._env.reset())
        return str(observation.messages[0]["content"]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._env is None:
            raise EnvError("call reset before step")
        step = asyncio.run(self._env.step(action))
        return step.observation, step.reward, step.terminated, step.truncated, step.info


def register() -> None:
    """Make `gymnasium.make("miles/guess-number-v0")` work."""
    if "miles/guess-number-v0" not in gymnasium.registry:
        gymnasium.register("miles/guess-number-v0", entry_point=GuessNumberGym)

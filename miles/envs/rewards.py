"""Numbers that environments give, made honest: a reward is one finite float, or the environment's error.

Also the rewards that a user adds: judges by name, weights for the parts of any environment.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from miles.config import Config
from miles.errors import ConfigError, EnvError
from miles.registry import import_target
from miles.types import Score, Task, Transcript

__all__ = ["JudgeConfig", "Judges", "as_float", "as_score", "reward_of"]


def as_float(reward: Any) -> float:
    """A reward as a finite float: 0-d and one-element arrays, numpy scalars, Decimals, bools.

    Raises EnvError for NaN, infinities and anything with more than one element.
    """
    try:
        while isinstance(reward, list | tuple) and len(reward) == 1:  # arrays that came as JSON
            reward = reward[0]
        value = float(reward.item() if hasattr(reward, "item") else reward)
    except (TypeError, ValueError) as error:
        raise EnvError(f"the environment returned {reward!r} as reward; it must be one number") from error
    if not math.isfinite(value):
        raise EnvError(f"the environment returned {value} as reward; it must be finite")
    return value


def reward_of(told: Mapping[str, Any]) -> float:
    """The reward of a step as it came over a wire; none is 0."""
    return as_float(0.0 if told.get("reward") is None else told["reward"])


def as_score(told: Any) -> Score:
    """A score from what environments and judges return: a Score, a mapping with `reward` and `parts`, or a number."""
    if isinstance(told, Score):
        return Score(reward=as_float(told.reward), parts={name: as_float(part) for name, part in told.parts.items()})
    if isinstance(told, Mapping):
        parts = {str(name): as_float(part) for name, part in (told.get("parts") or {}).items()}
        return Score(reward=as_float(told.get("reward")), parts=parts)
    return Score(reward=as_float(told))


class JudgeConfig(Config):
    """One part of a reward."""

    judge: str = ""
    """module:attr of `judge(task, transcript, score)`, sync or async, that returns a number; empty: the environment's
    own part of that name, or `score` for its reward."""
    weight: float = 1.0
    """What the reward counts of it; 0: a metric that is only recorded."""


class Judges:
    """The weighted sum of parts, in place of an environment's own reward."""

    def __init__(self, parts: Mapping[str, JudgeConfig]) -> None:
        self._weights = {name: part.weight for name, part in parts.items()}
        self._judges = {name: _judge(name, part.judge) for name, part in parts.items() if part.judge}

    async def __call__(self, task: Task, transcript: Transcript, score: Score) -> Score:
        """EnvError names the part that is missing or not a finite number; what a judge raises is passed on."""
        found = {**score.parts, "score": score.reward}
        for name, judge in self._judges.items():
            value = judge(task, transcript, score)
            value = await value if inspect.isawaitable(value) else value
            try:
                found[name] = as_float(value)
            except EnvError as error:
                raise EnvError(f"judge {name!r}: {error.message}") from error
        if missing := [name for name in self._weights if name not in found]:
            raise EnvError(f"the environment gave no part {missing[0]!r}; it gave: {', '.join(found)}")
        reward = math.fsum(weight * found[name] for name, weight in self._weights.items())
        return Score(reward=reward, parts=found)


def _judge(name: str, target: str) -> Callable[..., Any]:
    judge = import_target(f"judge {name!r}", target)
    if not callable(judge):
        raise ConfigError(
            f"judge {name!r}: {target} cannot be called; name an async def judge(task, transcript, score)"
        )
    return judge  # type: ignore[no-any-return]

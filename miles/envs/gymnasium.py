"""Gymnasium in: any registered environment of this Python is a taskset, played by text."""

from collections.abc import Callable
from typing import Any

from pydantic import Field

from miles.config import Config
from miles.envs.workers.inprocess import AdapterTaskset

__all__ = ["GymnasiumConfig", "GymnasiumTaskset"]


class GymnasiumConfig(Config):
    """Which registered environment."""

    id: str
    """Gymnasium's name of it, as FrozenLake-v1."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of gymnasium.make."""
    count: int = Field(1024, gt=0)
    """Tasks (seeds) of each split."""
    imports: tuple[str, ...] = ()
    """Modules that register environments when they are imported."""
    invalid_reward: float = 0.0
    """What an action costs that is none (it changes nothing else)."""
    enforce_mask: bool = False
    """Whether actions that `action_mask` rules out count as none."""


class GymnasiumTaskset(AdapterTaskset):
    """Every seed is a task of one environment. `make` builds what has no registered id."""

    config_class = GymnasiumConfig

    def __init__(self, config: GymnasiumConfig, make: Callable[[], Any] | None = None) -> None:
        super().__init__("gym", **config.model_dump(), make=make)

"""Advantages per episode, from the statistics of its group (never of rows)."""

import math
from collections.abc import Sequence

from miles.types import Episode, Group

__all__ = ["group_advantages", "grpo"]


def grpo(rewards: Sequence[float], *, divide_by_std: bool = True) -> list[float]:
    """(r - mean) / (std + 1e-6) over one group; all zero when the rewards are equal but for rounding.

    Group Relative Policy Optimization, DeepSeekMath, arXiv 2402.03300, section 4.1.2; std is the
    sample standard deviation. `divide_by_std=False` is Dr. GRPO, arXiv 2503.20783.
    """
    mean = math.fsum(rewards) / len(rewards)
    spread = max(rewards) - min(rewards)
    if spread <= 1e-6 * max(1.0, abs(mean)):
        return [0.0] * len(rewards)
    centred = [reward - mean for reward in rewards]
    if not divide_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + 1e-6) for c in centred]


def group_advantages(group: Group, *, divide_by_std: bool = True) -> list[tuple[Episode, float]]:
    """Each usable episode of a group with its advantage."""
    pairs = [(episode, episode.reward) for episode in group.episodes]
    usable = [(episode, reward) for episode, reward in pairs if reward is not None]
    if not usable:
        return []
    values = grpo([reward for _, reward in usable], divide_by_std=divide_by_std)
    return [(episode, value) for (episode, _), value in zip(usable, values, strict=True)]

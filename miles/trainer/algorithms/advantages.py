"""Advantages per episode, from the rewards of its group and its batch (never of rows)."""

import math
from collections.abc import Callable, Sequence

from miles.errors import TrainerError
from miles.registry import resolve
from miles.trainer.settings import AdvantageConfig, OverlongConfig
from miles.types import Episode, Finish, Group, alike

__all__ = ["Estimator", "group_advantages", "shaped_reward"]

Estimator = Callable[[Sequence[Sequence[float]]], list[list[float]]]
"""Rewards to advantages, both [group][episode]. Every group has an episode at least."""

_EPS = 1e-6


def grpo(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """(r - mean) / (std + 1e-6) within the group; std is the sample standard deviation.

    Group Relative Policy Optimization, DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    return [[c / (_spread(group) + _EPS) for c in _centred(group)] for group in rewards]


def dr_grpo(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """r - mean within the group. Dr. GRPO, arXiv 2503.20783; its loss is loss_unit=constant."""
    return [_centred(group) for group in rewards]


def rloo(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """r - mean of the others, = (r - mean) n/(n-1). REINFORCE Leave-One-Out, arXiv 2402.14740, eq. 5."""
    return [[c * len(group) / max(1, len(group) - 1) for c in _centred(group)] for group in rewards]


def reinforce_pp(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """(r - mean) / (std + 1e-6) over the whole batch. REINFORCE++, arXiv 2501.03262, eq. 5."""
    every = [reward for group in rewards for reward in group]
    centred, std = iter(_centred(every)), _spread(every)
    return [[next(centred) / (std + _EPS) for _ in group] for group in rewards]


def reinforce_pp_baseline(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """r - the group's mean, over the batch's std of that. REINFORCE++ with baseline, arXiv 2501.03262, section 3.3."""
    centred = [_centred(group) for group in rewards]
    std = _spread([c for group in centred for c in group])
    return [[c / (std + _EPS) for c in group] for group in centred]


def maxrl(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """(r - mean) / mean within the group, 0 where the mean is not positive: the gradient of log pass rate.

    Maximum Likelihood Reinforcement Learning, arXiv 2602.02710; rewards are meant to be 0 or 1.
    """
    result = []
    for group in rewards:
        mean = math.fsum(group) / len(group)
        result.append([c / mean if mean > 0 else 0.0 for c in _centred(group)])
    return result


def reward(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """The reward itself, without a baseline: for PPO, whose critic is the baseline, and for distillation alone."""
    return [list(group) for group in rewards]


def nothing(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Zeros: the environment's reward is not trained on (distillation alone)."""
    return [[0.0] * len(group) for group in rewards]


def group_advantages(groups: Sequence[Group], config: AdvantageConfig) -> list[list[tuple[Episode, float]]]:
    """Each usable episode with its advantage, group by group."""
    estimate: Estimator = resolve("advantages", config.estimator)
    usable = [[episode for episode in group.episodes if episode.reward is not None] for group in groups]
    rewards = [[shaped_reward(episode, config.overlong) for episode in group] for group in usable]
    given = [group for group in rewards if group]
    found = estimate(given)
    try:
        fits = [len(group) for group in found] == [len(group) for group in given]
    except TypeError:
        fits = False
    if not fits:
        raise TrainerError(
            f"advantage {config.estimator!r} must return one list for each of {len(given)} groups, with one number for "
            "each of its episodes"
        )
    filled = iter(found)
    return [list(zip(episodes, next(filled), strict=True)) if episodes else [] for episodes in usable]


def shaped_reward(episode: Episode, config: OverlongConfig) -> float:
    """The episode's reward, less DAPO's soft penalty on length (arXiv 2503.14476, eq. 13)."""
    base = episode.reward or 0.0
    if config.limit is None:
        return base
    over = episode.tree.sampled_tokens - (config.limit - config.margin)
    return base - config.penalty * min(1.0, max(0.0, over / config.margin))


def cut_off(episode: Episode) -> bool:
    """Whether a token limit ended the episode's last trained turn."""
    trained = [turn for turn in episode.tree.turns if turn.trainable]
    return bool(trained) and trained[-1].finish is Finish.LENGTH


def _centred(group: Sequence[float]) -> list[float]:
    """Differences to the mean; exactly 0 when the rewards are equal but for rounding."""
    if alike(group):
        return [0.0] * len(group)
    mean = math.fsum(group) / len(group)
    return [value - mean for value in group]


def _spread(group: Sequence[float]) -> float:
    if len(group) < 2:
        return 0.0
    mean = math.fsum(group) / len(group)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in group) / (len(group) - 1))

"""From groups to rows with advantages and scales: what is known about a step before any tensor exists."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from miles.registry import resolve
from miles.trainer.algorithms.advantages import cut_off, group_advantages
from miles.trainer.data.rows import Row, episode_rows
from miles.trainer.settings import AdvantageConfig, LossUnit
from miles.types import Episode, Group, WeightVersion

__all__ = ["Batch", "Part", "build_batch", "logprob_difference", "normalize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of one optimizer step, and what denominators are made of: owned tokens of every admitted episode and of
    every group, also of those that have no row."""

    rows: list[Row] = field(default_factory=list)
    owned_of: dict[str, int] = field(default_factory=dict)
    owned_in: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the trainer took at once: one part for every optimizer step."""

    parts: list[Part]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return [row for part in self.parts for row in part.rows]


def build_batch(groups: Sequence[Group], config: AdvantageConfig, *, version: WeightVersion, steps: int = 1) -> Batch:
    """Rows of all groups with their advantages, dealt to `steps` parts by group."""
    credit_of: Callable[[Episode], Mapping[int, float]] | None = (
        resolve("advantages", config.turn_credit) if config.turn_credit else None
    )
    parts = [Part() for _ in range(steps)]
    counts: Counter[str] = Counter()
    rewards: list[float] = []
    for place, (group, pairs) in enumerate(zip(groups, group_advantages(groups, config), strict=True)):
        part = parts[place % steps]
        part.owned_in[group.id] = 0
        counts["without_difference"] += group.without_difference
        counts["of_one"] += len(pairs) == 1
        for episode, advantage in pairs:
            credit = credit_of(episode) if credit_of else None
            rows = episode_rows(group, episode, advantage=advantage, credit=credit)
            part.owned_of[episode.id] = owned = sum(row.n_owned for row in rows)
            part.owned_in[group.id] += owned
            counts["without_logprob"] += _without_logprob(episode)
            rewards.append(episode.reward or 0.0)
            if config.overlong.mask and cut_off(episode):
                counts["overlong_masked"] += 1  # a rejection: its tokens stay in the denominators
            else:
                part.rows.extend(rows)
    batch = Batch(parts=parts)
    return replace(batch, metrics=_metrics(batch, counts, rewards, version))


def _metrics(batch: Batch, counts: Counter[str], rewards: list[float], version: WeightVersion) -> dict[str, float]:
    rows = batch.rows
    ages = version - np.concatenate([row.versions for row in rows]) if rows else np.zeros(0)
    metrics = {
        "reward/mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "groups/without_difference": float(counts["without_difference"]),
        "episodes": float(len(rewards)),
        "rows": float(len(rows)),
        "tokens/owned": float(sum(sum(part.owned_of.values()) for part in batch.parts)),
        "tokens/without_logprob": float(counts["without_logprob"]),
        "staleness/mean": float(ages.mean()) if ages.size else 0.0,
        "staleness/max": float(ages.max()) if ages.size else 0.0,
    }
    if counts["of_one"]:
        metrics["groups/of_one"] = float(counts["of_one"])  # no siblings, so no baseline: advantage 0
    if counts["overlong_masked"]:
        metrics["episodes/overlong_masked"] = float(counts["overlong_masked"])
    return metrics


def _without_logprob(episode: Episode) -> int:
    return sum(turn.logprobs.count(None) for turn in episode.tree.turns)


def logprob_difference(
    rows: Sequence[Row], scores: Sequence[NDArray[np.float32]], *, version: WeightVersion
) -> dict[str, float]:
    """How far `scores` are from the engine's logprobs, on tokens that `version` sampled; kl by k3."""
    pairs = zip(rows, scores, strict=True)
    log_ratios = [(score - row.logprobs)[row.versions == version] for row, score in pairs]
    every = np.concatenate([np.zeros(0), *log_ratios])
    if not every.size:
        return {"logprob_diff/tokens": 0.0}
    away = np.abs(every)
    return {
        "logprob_diff/tokens": float(every.size),
        "logprob_diff/mean": float(away.mean()),
        "logprob_diff/max": float(away.max()),
        "logprob_diff/kl": float((np.exp(np.minimum(every, 20.0)) - 1 - every).mean()),
    }


def normalize(
    rows: Sequence[Row],
    owned_of: Mapping[str, int],
    owned_in: Mapping[str, int] | None = None,
    *,
    unit: LossUnit,
    constant: float = 1.0,
) -> list[Row]:
    """Set each row's `scale`: the one place that divides. Denominators come from ownership alone.

    episode : 1/N * sum_r 1/n_r * sum_t l_t, with n_r the owned tokens of episode r over all its rows
    token   : 1/sum_r n_r * sum_t l_t
    group   : 1/G * sum_g 1/(sum_{r in g} n_r) * sum_t l_t
    constant: 1/(N * constant) * sum_t l_t

    `owned_of` names every episode admitted to the step, also those without a row, and `owned_in` every group (default:
    those of the rows).
    """
    episodes, total = max(1, len(owned_of)), max(1, sum(owned_of.values()))
    if owned_in is None:
        counted: Counter[str] = Counter()
        for row in rows:
            counted[row.group] += row.n_owned
        owned_in = counted

    def scale(row: Row) -> float:
        if unit == "episode":
            return 1.0 / (episodes * max(1, owned_of[row.episode]))
        if unit == "token":
            return 1.0 / total
        if unit == "group":
            return 1.0 / (max(1, len(owned_in)) * max(1, owned_in[row.group]))
        return 1.0 / (episodes * constant)

    return [replace(row, scale=scale(row)) for row in rows]

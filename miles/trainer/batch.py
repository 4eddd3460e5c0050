"""From groups to what the ranks compute: rows with advantages and scales, in equal numbers of micro-batches."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from miles.trainer.advantages import group_advantages
from miles.trainer.rows import Row, episode_rows
from miles.types import Group, WeightVersion

__all__ = ["Batch", "LossUnit", "build_batch", "logprob_difference", "micro_batches", "normalize"]

LossUnit = Literal["episode", "token", "group", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step's rows and what is known about them before any tensor exists.

    `flat` are the rows without advantage: not trained, but good to compare logprobs on.
    """

    rows: list[Row]
    flat: list[Row]
    metrics: dict[str, float] = field(default_factory=dict)


def build_batch(
    groups: Sequence[Group], *, version: WeightVersion, unit: LossUnit, constant: float, divide_by_std: bool
) -> Batch:
    """Rows of all groups. Groups without a difference in reward count in the denominators, not in compute."""
    rows: list[Row] = []
    rewards: list[float] = []
    owned_of: dict[str, int] = {}
    flat = unscored = 0
    for group in groups:
        pairs = group_advantages(group, divide_by_std=divide_by_std)
        flat += all(advantage == 0.0 for _, advantage in pairs)
        for episode, advantage in pairs:
            own = [replace(row, advantage=advantage) for row in episode_rows(group, episode)]
            owned_of[episode.id] = sum(row.n_owned for row in own)
            unscored += sum(lp is None for turn in episode.tree.turns for lp in turn.logprobs)
            rewards.append(episode.reward or 0.0)
            rows += own
    ages = [version - v for row in rows for v, own in zip(row.versions, row.owned, strict=True) if own]
    metrics = {
        "reward/mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "groups/without_difference": float(flat),
        "episodes": float(len(rewards)),
        "rows": float(len(rows)),
        "tokens/owned": float(sum(owned_of.values())),
        "tokens/without_logprob": float(unscored),
        "staleness/mean": sum(ages) / len(ages) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
    }
    scaled = normalize(rows, owned_of, unit=unit, constant=constant, groups=len(groups))
    live = [row for row in scaled if row.advantage != 0.0]
    return Batch(rows=live, flat=[row for row in scaled if row.advantage == 0.0], metrics=metrics)


def logprob_difference(
    rows: Sequence[Row], scores: Sequence[Sequence[float]], *, version: WeightVersion
) -> dict[str, float]:
    """How far `scores` are from the engine's logprobs, on tokens that `version` sampled."""
    diffs = [
        abs(score - old)
        for row, line in zip(rows, scores, strict=True)
        for score, old, own, sampled_by in zip(line, row.logprobs, row.owned, row.versions, strict=True)
        if own and sampled_by == version
    ]
    if not diffs:
        return {"logprob_diff/tokens": 0.0}
    mean = sum(diffs) / len(diffs)
    return {"logprob_diff/tokens": float(len(diffs)), "logprob_diff/mean": mean, "logprob_diff/max": max(diffs)}


def normalize(
    rows: Sequence[Row],
    owned_of: dict[str, int],
    *,
    unit: LossUnit,
    constant: float = 1.0,
    groups: int | None = None,
) -> list[Row]:
    """Set each row's `scale`: the one place that divides. Denominators come from ownership alone.

    episode : 1/N * sum_r 1/n_r * sum_t l_t, with n_r the owned tokens of episode r over all its rows
    token   : 1/sum_r n_r * sum_t l_t
    group   : 1/G * sum_g 1/(sum_{r in g} n_r) * sum_t l_t
    constant: 1/(N * constant) * sum_t l_t

    `owned_of` names every episode admitted to the step, also those without a row; `groups` is G (default: those with
    rows).
    """
    episodes, total = max(1, len(owned_of)), max(1, sum(owned_of.values()))
    of_group: Counter[str] = Counter()
    for row in rows:
        of_group[row.group] += row.n_owned

    def scale(row: Row) -> float:
        if unit == "episode":
            return 1.0 / (episodes * max(1, owned_of[row.episode]))
        if unit == "token":
            return 1.0 / total
        if unit == "group":
            return 1.0 / (max(1, groups or len(of_group)) * max(1, of_group[row.group]))
        return 1.0 / (episodes * constant)

    return [replace(row, scale=scale(row)) for row in rows]


def micro_batches(rows: Sequence[Row], *, ranks: int, tokens: int) -> list[list[list[Row]]]:
    """[rank][micro-batch][row]: padded size (rows x longest) at most `tokens`, every rank equally many.

    Ranks that run out get empty micro-batches: they take part in the collectives with weight zero.
    """
    shares: dict[int, list[Row]] = defaultdict(list)
    for place, row in enumerate(sorted(rows, key=lambda row: -len(row.ids))):
        lap, at = divmod(place, ranks)
        shares[at if lap % 2 == 0 else ranks - 1 - at].append(row)  # there and back: ranks stay balanced
    packed = [_pack(shares[rank], tokens) for rank in range(ranks)]
    most = max(1, *(len(batches) for batches in packed))
    return [batches + [[] for _ in range(most - len(batches))] for batches in packed]


def _pack(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    packed: list[list[Row]] = []
    for row in rows:  # longest first, so the first row of a micro-batch sets its width
        if packed and len(packed[-1][0].ids) * (len(packed[-1]) + 1) <= tokens:
            packed[-1].append(row)
        else:
            packed.append([row])
    return packed

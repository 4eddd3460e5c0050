"""Trees to training rows: one row per leaf path, every sampled token owned by exactly one row."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.types import Episode, Group, Routing, Tree, Turn

__all__ = ["Row", "demonstration_row", "episode_rows", "tree_rows"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One sequence of T tokens, n of which this row trains ("owns"). Any sequences are taken; arrays are kept.

    `ids` and `owned` are (T,); `logprobs` (the engine's) and `versions` are (n,), one entry per owned token, and so
    is every track of `tracks`: (n,) or (n, k). The first token has no predecessor and cannot be owned.
    `scale` multiplies the owned tokens' losses (set once, globally, by `normalize`); `advantage` is the episode's.
    `routing` are pieces (first token, experts chosen from there on). `pair` joins two rows of a preference.
    """

    ids: Ints
    owned: Bools
    logprobs: Floats
    versions: Ints
    tracks: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    routing: tuple[tuple[int, Routing], ...] = ()
    episode: str = ""
    group: str = ""
    pair: str = ""
    advantage: float = 0.0
    scale: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in (("ids", np.int64), ("owned", np.bool_), ("logprobs", np.float32), ("versions", np.int64)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=kind))
        n = self.n_owned
        if len(self.owned) != len(self.ids) or (n and self.owned[0]):
            raise ValueError(f"a row of {len(self.ids)} ids needs as many `owned`, the first one false")
        tracks: dict[str, NDArray[Any]] = {"logprobs": self.logprobs, "versions": self.versions, **self.tracks}
        uneven = {name: len(track) for name, track in tracks.items() if len(track) != n}
        if uneven:
            raise ValueError(f"a row that owns {n} tokens has tracks of other lengths: {uneven}")

    @property
    def n_owned(self) -> int:
        return int(self.owned.sum())


def tree_rows(tree: Tree, credit: Mapping[int, float] | None = None) -> list[Row]:
    """Rows of one tree. A shared turn belongs to the earliest leaf below it; rows owning nothing are left out.

    `credit` is added to the advantage of a turn's tokens: {turn id: amount}.
    """
    owner: dict[int, int] = {}
    rows = []
    for leaf in tree.leaves():
        path = tree.path(leaf.id)
        own = [turn.trainable and owner.setdefault(turn.id, leaf.id) == leaf.id for turn in path]
        row = _row(path, own, credit)
        if row is not None:
            rows.append(row)
    return rows


def _row(path: Sequence[Turn], own: Sequence[bool], credit: Mapping[int, float] | None) -> Row | None:
    ids: list[Sequence[int]] = []
    owned: list[Bools] = []
    logprobs: list[Floats] = []
    versions: list[Ints] = []
    credits: list[Floats] = []
    routing: list[tuple[int, Routing]] = []
    length = 0
    for turn, mine in zip(path, own, strict=True):
        if turn.routing is not None:
            routing.append((max(0, length - 1), turn.routing))
        ids += [turn.prompt_ids, turn.output_ids]
        sampled = np.array(turn.logprobs, dtype=np.float32)  # a None becomes NaN
        known = np.isfinite(sampled) if mine else np.zeros(len(sampled), dtype=np.bool_)
        if length + len(turn.prompt_ids) == 0:
            known[:1] = False  # nothing before it: no model could have given it a logprob
        owned += [np.zeros(len(turn.prompt_ids), dtype=np.bool_), known]
        if known.any():
            logprobs.append(sampled[known])
            versions.append(np.array(turn.versions, dtype=np.int64)[known])
            credits.append(np.full(int(known.sum()), (credit or {}).get(turn.id, 0.0), dtype=np.float32))
        length += len(turn.prompt_ids) + len(turn.output_ids)
    if not logprobs:
        return None
    mask = np.concatenate(owned)
    end = int(np.flatnonzero(mask)[-1]) + 1  # what follows the last owned token costs compute and changes nothing
    tokens = np.fromiter((i for part in ids for i in part), dtype=np.int64, count=length)
    return Row(
        ids=tokens[:end],
        owned=mask[:end],
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(versions),
        tracks={"credit": np.concatenate(credits)} if credit else {},
        routing=tuple(routing),
    )


def episode_rows(
    group: Group, episode: Episode, *, advantage: float = 0.0, credit: Mapping[int, float] | None = None
) -> list[Row]:
    """Rows of one episode with its names and its advantage on them."""
    rows = tree_rows(episode.tree, credit)
    return [replace(row, group=group.id, episode=episode.id, advantage=advantage) for row in rows]


def demonstration_row(ids: Sequence[int], owned: Iterable[bool], *, pair: str = "") -> Row:
    """A row to imitate or to prefer: no behaviour policy, so logprobs are 0."""
    mask = np.array(list(owned), dtype=np.bool_)
    mask[:1] = False
    n = int(mask.sum())
    zeros = np.zeros(n, dtype=np.float32)
    return Row(ids=np.asarray(ids), owned=mask, logprobs=zeros, versions=zeros.astype(np.int64), pair=pair)

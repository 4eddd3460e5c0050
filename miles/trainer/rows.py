"""Trees to training rows: one row per leaf path, every sampled token owned by exactly one row."""

from collections.abc import Sequence
from dataclasses import dataclass

from miles.types import Episode, Group, Tree, WeightVersion, iter_tokens

__all__ = ["Row", "demonstration_row", "episode_rows", "tree_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence. All lists have one entry per token; where `owned` is false the others are 0.

    `scale` multiplies the sum of the row's owned token losses (set once, globally, by `normalize`);
    `advantage` is the episode's.
    """

    ids: list[int]
    owned: list[bool]
    logprobs: list[float]
    versions: list[WeightVersion]
    episode: str = ""
    group: str = ""
    advantage: float = 0.0
    scale: float = 0.0

    @property
    def n_owned(self) -> int:
        return sum(self.owned)


def tree_rows(tree: Tree) -> list[Row]:
    """Rows of one tree. A shared turn belongs to the earliest leaf below it; rows owning nothing are left out."""
    owner: dict[int, int] = {}
    rows = []
    for leaf in tree.leaves():
        path = tree.path(leaf.id)
        for turn in path:
            owner.setdefault(turn.id, leaf.id)
        row = Row(ids=[], owned=[], logprobs=[], versions=[])
        for token, turn, index in iter_tokens(path):
            logprob = None if index is None else turn.logprobs[index]
            own = index is not None and logprob is not None and turn.trainable and owner[turn.id] == leaf.id
            row.ids.append(token)
            row.owned.append(own)
            row.logprobs.append(logprob if own and logprob is not None else 0.0)
            row.versions.append(turn.versions[index] if own and index is not None else 0)
        if row.n_owned:
            rows.append(_trimmed(row))
    return rows


def episode_rows(group: Group, episode: Episode) -> list[Row]:
    """Rows of one episode with its names on them."""
    return [_named(row, group.id, episode.id) for row in tree_rows(episode.tree)]


def demonstration_row(ids: Sequence[int], owned: Sequence[bool]) -> Row:
    """A row to imitate: no behaviour policy, so logprobs are 0."""
    zeros = [0] * len(ids)
    return Row(ids=list(ids), owned=list(owned), logprobs=[0.0] * len(ids), versions=zeros)


def _trimmed(row: Row) -> Row:
    """Without what follows the last owned token: it costs compute and changes nothing."""
    end = len(row.owned) - row.owned[::-1].index(True)
    return Row(ids=row.ids[:end], owned=row.owned[:end], logprobs=row.logprobs[:end], versions=row.versions[:end])


def _named(row: Row, group: str, episode: str) -> Row:
    return Row(
        ids=row.ids,
        owned=row.owned,
        logprobs=row.logprobs,
        versions=row.versions,
        group=group,
        episode=episode,
    )

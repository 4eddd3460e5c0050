"""Trees to training rows: one row per leaf path, every sampled token owned by exactly one row."""

from collections.abc import Sequence
from dataclasses import dataclass

from miles.types import Episode, Group, Tree, Turn, WeightVersion

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
        row = Row(ids=[], owned=[], logprobs=[], versions=[])
        for turn in tree.path(leaf.id):
            own = turn.trainable and owner.setdefault(turn.id, leaf.id) == leaf.id
            _append(row, turn, own)
        if row.n_owned:
            rows.append(_trimmed(row))
    return rows


def _append(row: Row, turn: Turn, own: bool) -> None:
    """Add a turn to a row, whole lists at a time: trees have a thousand turns."""
    prompt, output = len(turn.prompt_ids), len(turn.output_ids)
    row.ids.extend(turn.prompt_ids)
    row.ids.extend(turn.output_ids)
    row.owned.extend([False] * prompt)
    row.logprobs.extend([0.0] * prompt)
    row.versions.extend([0] * prompt)
    if not own:
        row.owned.extend([False] * output)
        row.logprobs.extend([0.0] * output)
        row.versions.extend([0] * output)
        return
    if None not in turn.logprobs:
        row.owned.extend([True] * output)
        row.logprobs.extend(turn.logprobs)  # type: ignore[arg-type]
        row.versions.extend(turn.versions)
        return
    known = [logprob is not None for logprob in turn.logprobs]
    row.owned.extend(known)
    row.logprobs.extend(0.0 if logprob is None else logprob for logprob in turn.logprobs)
    row.versions.extend(v if k else 0 for v, k in zip(turn.versions, known, strict=True))


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

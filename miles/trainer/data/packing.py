"""Micro-batches within a token budget, equally many for every rank: padded rows, or rows merged into a token trie.

A trie computes what several rows share (a prompt, a history, a whole turn) once. Its tokens lie in depth-first order,
so every subtree is contiguous and one number a token describes the attention: q sees k iff k <= q < end[k].
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from miles.trainer.data.rows import Row

__all__ = ["Costs", "Layout", "MicroBatch", "Trie", "micro_batches", "token_ratio", "trie"]

Layout = Literal["auto", "rows", "packed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a model pays for a token, and for a pair of tokens of which one attends to the other, in any one unit.

    `dense`: a trie's attention computes every pair under a mask, not only those that see each other. `trie`: how much
    dearer a pair is in a trie's attention.
    """

    token: float = 1.0
    pair: float = 0.0
    dense: bool = True
    trie: float = 1.0

    def of_row(self, n: int) -> float:
        """A row of n tokens, padding included; causal attention computes half of the pairs."""
        return self.token * n + self.pair * n * n / 2

    def of_trie(self, n: int, seen: int) -> float:
        """A trie of n tokens with `seen` pairs that see each other."""
        return self.token * n + self.pair * self.trie * (n * n if self.dense else seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass: padded to the longest, or (`packed`) merged into one trie."""

    rows: tuple[Row, ...] = ()
    packed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trie:
    """N unique tokens in depth-first order.

    ids, positions (depth) and end (first place after the subtree) are (N,); `paths[r]` are the places of row r.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    end: NDArray[np.int64]
    paths: tuple[NDArray[np.int64], ...]


def trie(rows: Sequence[Row]) -> Trie:
    """Merge the rows' common prefixes. `paths` are in the order of `rows`."""
    order = sorted(range(len(rows)), key=lambda at: _sort_key(rows[at]))
    total = sum(len(row.ids) for row in rows)
    ids, depth, end = (np.empty(total, dtype=np.int64) for _ in range(3))
    paths: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(rows)
    used, before = 0, np.empty(0, dtype=np.int64)
    for at, shared in zip(order, _shared_with_the_one_before([rows[at] for at in order]), strict=True):
        row = rows[at]
        end[before[shared:]] = used  # these subtrees are complete
        new = len(row.ids) - shared
        ids[used : used + new] = row.ids[shared:]
        depth[used : used + new] = np.arange(shared, shared + new)
        before = np.concatenate([before[:shared], np.arange(used, used + new)])
        paths[at] = before
        used += new
    end[before] = used
    return Trie(ids=ids[:used], positions=depth[:used], end=end[:used], paths=tuple(paths))


def token_ratio(rows: Sequence[Row]) -> float:
    """Tokens of all rows over the tokens of their trie."""
    ordered = sorted(rows, key=_sort_key)
    total = sum(len(row.ids) for row in rows)
    return total / max(1, total - sum(_shared_with_the_one_before(ordered)))


def micro_batches(
    rows: Sequence[Row], *, ranks: int, tokens: int, layout: Layout = "rows", costs: Costs | None = None
) -> list[list[MicroBatch]]:
    """[rank][micro-batch]: at most `tokens` tokens each, padding included (a longer row is alone), every rank equally
    many, loads balanced. Rows of one pair stay together. Layout `auto` takes tries where they are estimated to be
    cheaper by a tenth.

    Ranks that run out get empty micro-batches: they take part in the collectives with weight zero.
    """
    costs = costs or Costs()
    padded = _cut_padded(rows, ranks, tokens, costs) if layout != "packed" else []
    tries = _cut_tries(rows, ranks, tokens, costs) if layout != "rows" else []
    packed = layout == "packed" or (layout == "auto" and _total(padded) >= 1.1 * _total(tries))
    cut = tries if packed else padded
    shares: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    most = math.ceil(len(cut) / ranks)
    loads = [0.0] * ranks
    for cost, batch in sorted(cut, key=lambda priced: -priced[0]):  # the dearest first, to the least loaded rank
        rank = min((r for r in range(ranks) if len(shares[r]) < most), key=lambda r: loads[r])
        shares[rank].append(MicroBatch(rows=tuple(batch), packed=packed))
        loads[rank] += cost
    return [share + [MicroBatch()] * (max(1, most) - len(share)) for share in shares]


def _total(cut: Sequence[tuple[float, list[Row]]]) -> float:
    return sum(cost for cost, _ in cut)


def _cut_padded(rows: Sequence[Row], ranks: int, tokens: int, costs: Costs) -> list[tuple[float, list[Row]]]:
    """(cost, rows) of similar length. No larger than a rank's fair share, so that every rank has work."""
    units = sorted(_units(rows), key=lambda unit: -max(len(row.ids) for row in unit))
    fair = min(tokens, math.ceil(sum(len(row.ids) for row in rows) / max(1, ranks)))
    cut: list[tuple[float, list[Row]]] = []
    width = 0
    for unit in units:
        if cut and width * (len(cut[-1][1]) + len(unit)) <= fair:
            batch = cut[-1][1] + unit
        else:
            batch, width = unit, max(len(row.ids) for row in unit)
            cut.append((0.0, []))
        cut[-1] = (len(batch) * costs.of_row(width), batch)
    return cut


def _cut_tries(rows: Sequence[Row], ranks: int, tokens: int, costs: Costs) -> list[tuple[float, list[Row]]]:
    """(cost, rows), cut from the sorted rows where the budget ends, or where going on in one mask costs more than
    computing the shared prefix again."""
    units = sorted(_units(rows), key=lambda unit: _sort_key(unit[0]))
    flat = [row for unit in units for row in unit]
    unique = sum(len(row.ids) for row in flat) - sum(_shared_with_the_one_before(flat))
    fair = min(tokens, math.ceil(unique / max(1, ranks)))
    cut: list[tuple[float, list[Row]]] = []
    size = seen = 0
    for unit in units:
        alone, alone_seen = _new_tokens(unit, None)
        new, new_seen = _new_tokens(unit, cut[-1][1][-1]) if cut else (alone, alone_seen)
        together = costs.of_trie(size + new, seen + new_seen)
        if cut and size + new <= fair and together <= cut[-1][0] + costs.of_trie(alone, alone_seen):
            size, seen = size + new, seen + new_seen
            cut[-1] = (together, cut[-1][1] + unit)
        else:
            size, seen = alone, alone_seen
            cut.append((costs.of_trie(size, seen), list(unit)))
    return cut


def _new_tokens(unit: Sequence[Row], before: Row | None) -> tuple[int, int]:
    """Tokens that a unit adds to a trie whose last row is `before` (of sorted rows, it shares with no other more), and
    pairs of tokens of which one sees the other."""
    ordered = ([before] if before is not None else []) + list(unit)
    shared = list(_shared_with_the_one_before(ordered))[len(ordered) - len(unit) :]
    lengths = [len(row.ids) for row in unit]
    pairs = sum((n * (n + 1) - s * (s + 1)) // 2 for n, s in zip(lengths, shared, strict=True))
    return sum(lengths) - sum(shared), pairs


def _units(rows: Sequence[Row]) -> list[list[Row]]:
    """What must be in one micro-batch: single rows, and the rows of a pair."""
    pairs: dict[str, list[Row]] = {}
    units: list[list[Row]] = []
    for row in rows:
        if not row.pair:
            units.append([row])
        elif row.pair in pairs:
            pairs[row.pair].append(row)
        else:
            units.append(pairs.setdefault(row.pair, [row]))
    return units


def _sort_key(row: Row) -> bytes:
    """Order in which rows that share a prefix are neighbours: big-endian bytes compare like the ids themselves."""
    return row.ids.astype(">u4").tobytes()


def _shared_with_the_one_before(ordered: Sequence[Row]) -> Iterator[int]:
    """Length of the common prefix with the row before, for each row; 0 for the first."""
    before: Row | None = None
    for row in ordered:
        if before is None:
            yield 0
        else:
            n = min(len(row.ids), len(before.ids))
            differ = row.ids[:n] != before.ids[:n]
            yield int(differ.argmax()) if differ.any() else n
        before = row

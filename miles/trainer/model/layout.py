"""Micro-batches as tensors: what the model reads, and which of its positions predict the owned tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.routing import decode_routing
from miles.trainer.algorithms.tokens import Tokens
from miles.trainer.data.credit import credit_of
from miles.trainer.data.packing import MicroBatch, trie
from miles.trainer.data.rows import Row

__all__ = ["Layout", "gather", "lay_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """B sequences of L tokens. `picks` (K,) are places in the flattened B * L whose next token is `targets` (K,), in
    the order of the rows and of their owned tokens. `candidates` (K, C) are tokens whose logprobs are asked too.

    A trie is one sequence with `positions` (1, L) and `end` (L,); padded rows have neither. `experts` (B * L, layers,
    k) are recorded choices of experts, -1 where there are none.
    """

    ids: Tensor
    picks: Tensor
    targets: Tensor
    positions: Tensor | None = None
    end: Tensor | None = None
    experts: Tensor | None = None
    candidates: Tensor | None = None


def lay_out(batch: MicroBatch, device: torch.device, *, multiple: int = 1, routing: bool = False) -> Layout:
    """Tensors of a micro-batch on `device`. A trie's length is filled up to a `multiple`."""
    if batch.packed and batch.rows:
        return _packed(batch.rows, device, multiple, routing)
    width = max((len(row.ids) for row in batch.rows), default=2)
    ids = np.zeros((max(1, len(batch.rows)), width), dtype=np.int64)
    places = []
    for at, row in enumerate(batch.rows):
        ids[at, : len(row.ids)] = row.ids
        places.append(np.arange(at * width, at * width + len(row.ids)))
    return Layout(
        ids=torch.from_numpy(ids).to(device),
        experts=_experts(batch.rows, places, ids.size, device) if routing else None,
        **_picks(batch.rows, places, device),
    )


def _packed(rows: tuple[Row, ...], device: torch.device, multiple: int, routing: bool) -> Layout:
    merged = trie(rows)
    filled = -len(merged.ids) % multiple
    positions = np.concatenate([merged.positions, np.zeros(filled, dtype=np.int64)])
    end = np.concatenate([merged.end, np.arange(len(merged.ids), len(merged.ids) + filled) + 1])  # each sees itself
    ids = np.concatenate([merged.ids, np.zeros(filled, dtype=np.int64)])
    return Layout(
        ids=torch.from_numpy(ids)[None].to(device),
        positions=torch.from_numpy(positions)[None].to(device),
        end=torch.from_numpy(end).to(device),
        experts=_experts(rows, merged.paths, len(ids), device) if routing else None,
        **_picks(rows, merged.paths, device),
    )


def _picks(
    rows: tuple[Row, ...], places: "list[NDArray[np.int64]] | tuple[NDArray[np.int64], ...]", device: torch.device
) -> dict[str, Tensor]:
    """The predecessor of an owned token is the one before it in its row, wherever that lies."""
    none = [np.zeros(0, dtype=np.int64)]
    candidates = [row.tracks["candidate_ids"] for row in rows if "candidate_ids" in row.tracks]
    picks = [place[np.flatnonzero(row.owned) - 1] for row, place in zip(rows, places, strict=True)]
    targets = [row.ids[row.owned] for row in rows]
    return {
        "picks": torch.from_numpy(np.concatenate(picks or none)).to(device),
        "targets": torch.from_numpy(np.concatenate(targets or none)).to(device),
        **({"candidates": torch.from_numpy(np.concatenate(candidates)).to(device)} if candidates else {}),
    }


def _experts(
    rows: tuple[Row, ...],
    places: "list[NDArray[np.int64]] | tuple[NDArray[np.int64], ...]",
    size: int,
    device: torch.device,
) -> Tensor | None:
    experts: NDArray[np.int64] | None = None
    for row, place in zip(rows, places, strict=True):
        for start, routing in row.routing:
            chosen = decode_routing(routing)[: max(0, len(row.ids) - start)]
            if experts is None:
                experts = np.full((size, *chosen.shape[1:]), -1, dtype=np.int64)
            experts[place[start : start + len(chosen)]] = chosen
    return None if experts is None else torch.from_numpy(experts).to(device)


def gather(rows: tuple[Row, ...], device: torch.device) -> Tokens:
    """The owned tokens of a micro-batch with everything that is known of them before the model computes."""
    counts = [row.n_owned for row in rows]
    k = sum(counts)

    def flat(parts: list[NDArray[np.generic]], kind: type[np.generic]) -> Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(joined.astype(kind)).to(device)

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float32), counts)).to(device)

    names = {name for row in rows for name in row.tracks} - {"credit", "candidate_ids"}
    tracks = {name: flat([row.tracks[name] for row in rows], np.float32) for name in sorted(names)}
    if any(row.pair for row in rows):
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(row.pair for row in rows))}
        tracks["pair"] = spread([float(numbers[row.pair]) for row in rows])
    advantages = spread([row.advantage for row in rows])
    if any("credit" in row.tracks for row in rows):
        advantages = advantages + flat([credit_of(row) for row in rows], np.float32)
    return Tokens(
        logprobs=torch.zeros(k, device=device),
        old=flat([row.logprobs for row in rows], np.float32),
        versions=flat([row.versions for row in rows], np.int64),
        advantages=advantages,
        scales=spread([row.scale for row in rows]),
        row=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(device),
        rows=len(rows),
        tracks=tracks,
    )

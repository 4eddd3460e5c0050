"""Attention over a token trie: q sees k iff k <= q < end[k].

SDPA with a boolean mask is the reference and runs anywhere; FlexAttention needs no N x N mask and runs on CUDA (it has
no backward pass on CPUs in torch 2.13). Models whose layers are not plain attention cannot compute tries.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["FLEX_MULTIPLE", "tree_mask", "why_not_packed"]

FLEX_MULTIPLE = 128
"""The side of a block: lengths are filled up to it."""


def why_not_packed(config: Any) -> str:
    """Why a model of this configuration cannot compute a trie; empty when it may."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "its attention has a sliding window"
    return ""


def tree_mask(end_N: Tensor, kind: str) -> Any:
    """The mask that transformers' attention of this `kind` ("sdpa", "flex_attention") takes as attention_mask."""
    if kind == "flex_attention":
        return _block_mask(end_N)
    places = torch.arange(len(end_N), device=end_N.device)
    return ((places[:, None] >= places[None]) & (places[:, None] < end_N[None]))[None, None]


def _block_mask(end_N: Tensor) -> Any:
    """Which blocks of keys a block of queries sees, wholly or in part, from the ends alone: no N x N tensor exists."""
    from torch.nn.attention.flex_attention import BlockMask

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < end_N[k])

    side = FLEX_MULTIPLE
    ends = end_N.view(-1, side)
    block = torch.arange(len(ends), device=end_N.device)
    first, last = block * side, block * side + side - 1
    below, some = block[:, None] > block[None], first[:, None] < ends.amax(-1)[None]
    whole = below & (last[:, None] < ends.amin(-1)[None])
    part = (below | (block[:, None] == block[None])) & some & ~whole
    return BlockMask.from_kv_blocks(
        *_listed(part), *_listed(whole), BLOCK_SIZE=side, mask_mod=sees, seq_lengths=(len(end_N), len(end_N))
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """A boolean matrix of blocks as FlexAttention wants it: how many in each row, and their columns first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

"""Attention over a token trie: q sees k iff k <= q < end[k].

SDPA with a boolean mask is the reference and runs anywhere; FlexAttention needs no N x N mask and runs on CUDA (it has
no backward pass on CPUs in torch 2.13). Models whose layers are not plain attention cannot compute tries.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["FLEX_MULTIPLE", "tree_mask", "why_not_packed"]

FLEX_MULTIPLE = 128
"""Lengths are filled up to this, the side of a block."""


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
    n = len(end_N)
    if kind == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q < end_N[k])

        return create_block_mask(sees, None, None, n, n, device=str(end_N.device))
    places = torch.arange(n, device=end_N.device)
    return ((places[:, None] >= places[None]) & (places[:, None] < end_N[None]))[None, None]

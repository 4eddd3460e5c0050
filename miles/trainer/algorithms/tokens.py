"""What a loss sees: the owned tokens of one micro-batch, as flat vectors. K is how many there are."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All tensors are (K,) unless said otherwise. Only what the model computed has a gradient.

    logprobs: under the weights now; entropy: of the position's whole distribution; candidates (K, C): logprobs of
    `tracks["candidate_ids"]`; values: the critic's, before the token. `old` are the engine's logprobs, `row` numbers
    the rows of the micro-batch from 0 to `rows` - 1; `used` are the tokens that the off-policy correction leaves in. A
    loss returns (K,); each entry is multiplied by its `scale`.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    scales: Tensor
    versions: Tensor
    row: Tensor
    rows: int
    tracks: Mapping[str, Tensor] = field(default_factory=dict)
    entropy: Tensor | None = None
    candidates: Tensor | None = None
    values: Tensor | None = None
    used: Tensor | None = None

    def computed(self, found: Mapping[str, Any]) -> "Tokens":
        """With what the model says: logprobs, entropy, candidates, values."""
        return replace(self, **found)

    def sum_by_row(self, values: Tensor) -> Tensor:
        """(rows,) sums of a (K,) vector over each row's tokens."""
        return torch.zeros(self.rows, dtype=values.dtype, device=values.device).index_add(0, self.row, values)

    def mean_by_row(self, values: Tensor, among: Tensor | None = None) -> Tensor:
        """(K,) each token with its row's mean, over the tokens of a mask where one is given."""
        counted = torch.ones_like(values) if among is None else among.to(values.dtype)
        counts = self.sum_by_row(counted).clamp(min=1)
        return (self.sum_by_row(values * counted) / counts)[self.row]

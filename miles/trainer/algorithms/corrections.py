"""Weights and rejections for tokens that other weights, or another implementation, sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.trainer.algorithms.tokens import Tokens
from miles.trainer.settings import CorrectionConfig

__all__ = ["Correction", "correct"]

MAX_LOG_RATIO = 20.0
"""Log ratios are cut here before they are exponentiated: nothing overflows, and nothing this far is ever used."""


@dataclass(frozen=True, slots=True)
class Correction:
    """`weight` (K,) multiplies the loss, `used` (K,) says which tokens have one; sums are for metrics."""

    weight: Tensor
    used: Tensor
    sums: dict[str, Tensor]


def correct(tokens: Tokens, config: CorrectionConfig) -> Correction:
    """How far each token is from the policy that the loss is anchored on, and what follows from it. No gradient."""
    recomputed = config.anchor == "recomputed"
    anchor = tokens.tracks["anchor"] if recomputed else tokens.logprobs.detach()
    log_w = (anchor - tokens.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    w = (tokens.mean_by_row(log_w) if config.level == "sequence" else log_w).exp()
    near = (w >= config.low) & (w <= config.high) if config.mode == "mask" else torch.ones_like(w, dtype=torch.bool)
    distance = _distance(tokens, log_w, config)
    kept = near if distance is None else near & (distance <= config.reject_above)
    if recomputed:
        weight = w.clamp(max=config.high) if config.mode == "truncate" else w
    else:  # the loss has the ratio already: what is above the limit is taken off it
        weight = (config.high / w).clamp(max=1.0) if config.mode == "truncate" else torch.ones_like(w)
    raw = log_w.exp()
    sums = {
        "masked": (~near).sum(),
        "rejected": (near & ~kept).sum(),
        "weight": raw.sum(),
        "weight_squared": raw.square().sum(),
        "kl": (raw - 1 - log_w).sum(),
    }
    return Correction(weight, kept, sums)


def _distance(tokens: Tokens, log_w: Tensor, config: CorrectionConfig) -> Tensor | None:
    """Distance that rejects, per token; Schulman's k1, k2, k3 of KL(behaviour, anchor)."""
    if config.reject == "off":
        return None
    if config.reject == "k1":
        distance = -log_w
    else:
        distance = 0.5 * log_w.square() if config.reject == "k2" else log_w.exp() - 1 - log_w
    return (tokens.mean_by_row(distance) if config.reject_level == "sequence" else distance).abs()

"""Losses per token. Shapes: B rows, T positions; position t of logprobs_BT is the logprob of token t+1.

Masked positions are replaced before any arithmetic, so a NaN or an overflow there reaches nothing.
"""

import torch
from pydantic import Field
from torch import Tensor

from miles.config import Config

__all__ = ["PolicyLossConfig", "policy_loss", "sft_loss", "token_logprobs"]

_MAX_LOG_RATIO = 20.0


class PolicyLossConfig(Config):
    """Clipped policy gradient (PPO, arXiv 1707.06347, eq. 7) against the engine's own logprobs."""

    clip_low: float = Field(0.2, ge=0.0, lt=1.0)
    """Ratio may fall to 1 - clip_low."""
    clip_high: float = Field(0.28, ge=0.0)
    """Ratio may rise to 1 + clip_high (DAPO, arXiv 2503.14476)."""
    dual_clip: float = Field(3.0, gt=1.0)
    """Bound of the loss at negative advantage, in advantages (arXiv 1912.09729)."""
    mask_low: float = Field(0.125, ge=0.0)
    """Tokens whose ratio is below this are left out: too far off-policy."""
    mask_high: float = Field(8.0, gt=0.0)
    """Tokens whose ratio is above this are left out."""


def token_logprobs(logits_BTV: Tensor, ids_BT: Tensor, temperature: float) -> Tensor:
    """Logprob of each next token under logits/temperature: (B, T-1), float32."""
    logits = logits_BTV[:, :-1].float() / temperature
    picked = logits.gather(-1, ids_BT[:, 1:, None])[..., 0]
    return picked - torch.logsumexp(logits, dim=-1)


def policy_loss(
    logprobs_BT: Tensor, old_BT: Tensor, advantages_B: Tensor, owned_BT: Tensor, config: PolicyLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss per token, 0 where not owned; sums for metrics). Not yet divided by anything."""
    zero = torch.zeros_like(logprobs_BT)
    log_ratio = torch.where(owned_BT, logprobs_BT - old_BT, zero)
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    advantages = advantages_B[:, None]
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    loss = torch.where(advantages < 0, torch.minimum(loss, -config.dual_clip * advantages), loss)
    near = (ratio.detach() >= config.mask_low) & (ratio.detach() <= config.mask_high)
    used = owned_BT & near
    loss = torch.where(used, loss, zero)
    detached = log_ratio.detach()
    sums = {
        "clipped": (used & (ratio.detach() != clipped.detach())).sum(),
        "masked": (owned_BT & ~near).sum(),
        "kl": torch.where(owned_BT, detached.exp() - 1 - detached, zero).clamp(max=1e6).sum(),
    }
    return loss, sums


def sft_loss(logprobs_BT: Tensor, owned_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the owned tokens."""
    loss = torch.where(owned_BT, -logprobs_BT, torch.zeros_like(logprobs_BT))
    return loss, {}

"""Losses per token. Shapes: B rows, T positions; position t of logprobs_BT is the logprob of token t+1.

Masked positions are replaced before any arithmetic, so a NaN or an overflow there reaches nothing.
"""

import torch
from torch import Tensor

from miles.trainer.settings import PolicyLossConfig

__all__ = ["policy_loss", "sft_loss", "token_logprobs"]

_MAX_LOG_RATIO = 20.0


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

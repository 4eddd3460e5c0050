"""Losses of owned tokens: `f(tokens, spec) -> (loss per token (K,), sums for metrics)`. Nothing is divided here.

Tokens that are not owned never get here, so nothing that stands in their places can reach a loss.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from miles.registry import resolve
from miles.trainer.algorithms.corrections import MAX_LOG_RATIO, correct
from miles.trainer.algorithms.tokens import Tokens
from miles.trainer.settings import KlConfig, StepSpec

__all__ = ["Loss", "loss_of"]

Sums = dict[str, Tensor]
Loss = Callable[[Tokens, StepSpec], tuple[Tensor, Sums]]


def loss_of(spec: StepSpec) -> Loss:
    """The loss that a step minimises."""
    losses: dict[str, Loss] = {"policy": policy, "sft": sft, "dpo": dpo, "value": value}
    return losses[spec.loss]


def policy(tokens: Tokens, spec: StepSpec) -> tuple[Tensor, Sums]:
    """The configured policy gradient with its corrections, and what is added to it: KL, entropy, distillation."""
    correction = correct(tokens, spec.correction)
    tokens = replace(tokens, used=correction.used)
    gradient: Loss = resolve("losses", spec.policy.kind)
    loss, sums = gradient(tokens, spec)
    loss = loss * correction.weight
    sums |= correction.sums
    if spec.kl.coefficient and spec.kl.place == "loss":
        kl = _kl(tokens, spec.kl, _log_ratio(tokens, spec))
        loss, sums = loss + spec.kl.coefficient * kl, sums | {"kl_reference": kl.detach().sum()}
    if tokens.entropy is not None:
        loss, sums = loss - spec.policy.entropy * tokens.entropy, sums | {"entropy": tokens.entropy.detach().sum()}
    if tokens.candidates is not None and spec.distill:
        divergence = candidate_divergence(tokens)
        loss, sums = loss + spec.distill * divergence, sums | {"distill": divergence.detach().sum()}
    sums |= {"used": correction.used.sum()}
    return torch.where(correction.used, loss, torch.zeros_like(loss)), sums


def ppo(tokens: Tokens, spec: StepSpec) -> tuple[Tensor, Sums]:
    """-min(r A, clip(r) A), bounded by dual_clip * |A| at negative advantages. PPO, arXiv 1707.06347, eq. 7."""
    return _clipped(_log_ratio(tokens, spec), tokens, spec)


def gspo(tokens: Tokens, spec: StepSpec) -> tuple[Tensor, Sums]:
    """PPO with one ratio for a row: the geometric mean of its tokens'. GSPO, arXiv 2507.18071, eq. 5 to 7.

    A row's owned tokens are the sequence: of a tree, the part of a path that the row owns. Tokens that the correction
    leaves out have no part in it.
    """
    return _clipped(tokens.mean_by_row(_log_ratio(tokens, spec), among=tokens.used), tokens, spec)


def cispo(tokens: Tokens, spec: StepSpec) -> tuple[Tensor, Sums]:
    """-sg(min(r, 1 + clip_high)) A log p: only the weight is clipped. CISPO, arXiv 2506.13585, eq. 4."""
    ratio = _log_ratio(tokens, spec).detach().exp()
    weight = ratio.clamp(max=1 + spec.policy.clip_high)
    return -weight * tokens.advantages * tokens.logprobs, {"clipped": (weight != ratio).sum()}


def reinforce(tokens: Tokens, spec: StepSpec) -> tuple[Tensor, Sums]:
    """-sg(r) A log p, unclipped: what limits the ratio is the correction alone."""
    ratio = _log_ratio(tokens, spec).detach().exp()
    return -ratio * tokens.advantages * tokens.logprobs, {}


def sft(tokens: Tokens, spec: StepSpec) -> tuple[Tensor, Sums]:
    """Negative log-likelihood."""
    return -tokens.logprobs, {}


def dpo(tokens: Tokens, spec: StepSpec) -> tuple[Tensor, Sums]:
    """-log sigmoid(beta * (chosen - rejected)) of log ratios to the reference. DPO, arXiv 2305.18290, eq. 7.

    The micro-batch's rows are pairs: tracks `pair` (number of the pair) and `sign` (+1 chosen, -1 rejected). A pair's
    loss stands at the first of its chosen tokens.
    """
    beta, smooth = spec.dpo.beta, spec.dpo.label_smoothing
    pair, sign = tokens.tracks["pair"].long(), tokens.tracks["sign"]
    log_ratio = (tokens.logprobs - tokens.tracks["reference"]) * sign
    pairs = int(pair.max()) + 1 if pair.numel() else 0
    margin = beta * torch.zeros(pairs, device=pair.device).index_add(0, pair, log_ratio)
    by_pair = -(1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)
    chosen = torch.nonzero(sign > 0).squeeze(-1)
    first = torch.full((pairs,), tokens.logprobs.numel(), dtype=torch.long, device=pair.device)
    first = first.scatter_reduce(0, pair[chosen], chosen, reduce="amin")
    loss = torch.zeros_like(tokens.logprobs).index_add(0, first, by_pair)
    sums = {"pairs": margin.new_tensor(float(pairs)), "preferred": (margin.detach() > 0).sum()}
    return loss, sums | {"margin": margin.detach().sum()}


def value(tokens: Tokens, spec: StepSpec) -> tuple[Tensor, Sums]:
    """Half the squared error to the returns; a value that moved further than value_clip gains nothing by it.

    PPO's clipped critic, arXiv 2005.12729, eq. 2.
    """
    assert tokens.values is not None, "the value loss needs a critic"
    returns, before = tokens.tracks["returns"], tokens.tracks["values_before"]
    near = before + (tokens.values - before).clamp(-spec.value_clip, spec.value_clip)
    loss = 0.5 * torch.maximum((tokens.values - returns).square(), (near - returns).square())
    error = (tokens.values.detach() - returns).square()
    return loss, {"value_error": error.sum(), "returns": returns.sum(), "returns_squared": returns.square().sum()}


def candidate_divergence(tokens: Tokens) -> Tensor:
    """Reverse KL to the teacher over C candidates and the rest as one more outcome: (K,).

    sum_c p(c) (log p(c) - log q(c)) + p(rest) (log p(rest) - log q(rest)); 0 where the teacher did not score.
    """
    student = tokens.candidates
    assert student is not None, "distillation on candidates needs their logprobs"
    teacher = tokens.tracks["candidate_logprobs"]
    known = torch.isfinite(teacher)
    safe = torch.where(known, teacher, student.detach())
    inside = torch.where(known, student.exp() * (student - safe), torch.zeros_like(student)).sum(-1)
    left = _log_rest(torch.where(known, student, student.new_tensor(-100.0)))
    right = _log_rest(torch.where(known, safe, safe.new_tensor(-100.0)))
    divergence = inside + left.exp() * (left - right)
    return torch.where(known.any(-1), divergence, torch.zeros_like(divergence))


def _log_rest(logprobs_KC: Tensor) -> Tensor:
    """Log of the probability that is left, at least 1e-6."""
    return torch.log((1 - logprobs_KC.exp().sum(-1)).clamp(min=1e-6))


def _clipped(log_ratio: Tensor, tokens: Tokens, spec: StepSpec) -> tuple[Tensor, Sums]:
    config, advantages = spec.policy, tokens.advantages
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    loss = torch.where(advantages < 0, torch.minimum(loss, -config.dual_clip * advantages), loss)
    return loss, {"clipped": (ratio.detach() != clipped.detach()).sum()}


def _log_ratio(tokens: Tokens, spec: StepSpec) -> Tensor:
    anchor = tokens.tracks["anchor"] if spec.correction.anchor == "recomputed" else tokens.old
    return (tokens.logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _kl(tokens: Tokens, config: KlConfig, log_ratio: Tensor) -> Tensor:
    """Schulman's estimators of KL(policy, reference) per token (approximating KL divergence, 2020)."""
    to_reference = (tokens.tracks["reference"] - tokens.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if config.estimator == "k1":
        return -to_reference
    if config.estimator == "k2":
        return 0.5 * to_reference.square()
    k3 = to_reference.exp() - 1 - to_reference
    return k3 if config.estimator == "k3" else log_ratio.exp() * k3

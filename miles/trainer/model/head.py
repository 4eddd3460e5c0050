"""The policy (or critic) as the trainer computes it: answers for chosen positions only, logits a chunk at a time."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from miles.errors import ConfigError

__all__ = ["Policy"]


class Policy(nn.Module):
    """A Hugging Face causal language model that gives logprobs of K chosen targets, never all T x V logits.

    The head is computed here, inside the forward pass that FSDP sees, `chunk` positions at a time, and again in the
    backward pass. `plain` says that the model's head is more than a matrix (soft caps, scales: found by a self-test);
    then the model computes its logits itself. A critic has a value per position instead.
    """

    def __init__(self, lm: Any, *, chunk: int, kind: str = "chunked", critic: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.chunk, self.kind = chunk, kind
        self.plain = False
        self.value: nn.Linear | None = None
        if critic:
            self.value = nn.Linear(lm.config.hidden_size, 1, bias=False)
            nn.init.zeros_(self.value.weight)
            if not lm.config.tie_word_embeddings:
                lm.get_output_embeddings().requires_grad_(False)  # a critic has no use for it

    def forward(
        self,
        ids_BL: Tensor,
        picks_K: Tensor,
        targets_K: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Any = None,
        temperature: float = 1.0,
        entropy: bool = False,
        candidates_KC: Tensor | None = None,
        top: int = 0,
    ) -> dict[str, Tensor]:
        """`logprobs` (K,) in float32 under logits / temperature; if asked `entropy` (K,), `candidates` (K, C), and the
        `top` likeliest tokens as `top_ids` and `top_logprobs` (K, top). A critic: `values` (K,)."""
        given = {"input_ids": ids_BL, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        if self.plain and self.value is None:
            logits = self.lm(**given).logits.flatten(0, 1)[picks_K]
            return _of_logits(logits, targets_K, temperature, entropy, candidates_KC, top)
        hidden = self.lm.base_model(**given).last_hidden_state.flatten(0, 1)[picks_K]
        if self.value is not None:
            return {"values": self.value(hidden).squeeze(-1).float().clone()}  # FSDP cannot hook a view
        head = self.lm.get_output_embeddings()
        plain_ask = candidates_KC is None and not entropy and not top and head.bias is None
        if self.kind == "liger" and plain_ask and len(picks_K):
            return {"logprobs": _liger(hidden / temperature, head, targets_K)}
        return self._chunked(hidden, head, targets_K, temperature, entropy, candidates_KC, top)

    def _chunked(
        self,
        hidden: Tensor,
        head: Any,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        candidates: Tensor | None,
        top: int,
    ) -> dict[str, Tensor]:
        def compute(hidden: Tensor, targets: Tensor, candidates: Tensor | None) -> dict[str, Tensor]:
            return _of_logits(head(hidden), targets, temperature, entropy, candidates, top)

        parts = []
        for start in range(0, max(1, len(targets)), self.chunk):
            here = slice(start, start + self.chunk)
            few = None if candidates is None else candidates[here]
            parts.append(
                checkpoint(compute, hidden[here], targets[here], few, use_reentrant=False, preserve_rng_state=False)
            )
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _of_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool, candidates: Tensor | None, top: int
) -> dict[str, Tensor]:
    scaled = logits.float() / temperature
    total = torch.logsumexp(scaled, dim=-1)
    found = {"logprobs": scaled.gather(-1, targets[:, None]).squeeze(-1) - total}
    if entropy:  # -sum p log p = log Z - sum p * logit
        found["entropy"] = total - (torch.softmax(scaled, dim=-1) * scaled).sum(-1)
    if candidates is not None:
        found["candidates"] = scaled.gather(-1, candidates) - total[:, None]
    if top:
        best = scaled.topk(top, dim=-1)
        found |= {"top_ids": best.indices, "top_logprobs": best.values - total[:, None]}
    return found


def _liger(hidden: Tensor, head: Any, targets: Tensor) -> Tensor:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise ConfigError("trainer.compute.head=liger needs `pip install liger-kernel`; or set head=chunked") from error
    loss: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="none")(head.weight, hidden, targets)
    return -loss.float()

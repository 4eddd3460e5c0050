"""Routing replay (R3, arXiv 2510.11370): mixture-of-experts layers use the experts that the engine chose.

A hook behind each router replaces the chosen experts and computes their weights from the router's own logits, so
gradients reach the router. Choices lie by module, not by a cursor: recomputed activations find the same ones.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.errors import TrainerError

__all__ = ["RoutingReplay"]


def _softmax_weights(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """Qwen3-MoE and its kin: softmax over all experts, renormalised over the chosen ones where the model does."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _sigmoid_weights(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """GLM-4-MoE and its kin: sigmoid scores without the selection's bias, scaled."""
    weights = logits.sigmoid().gather(-1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * float(router.routed_scaling_factor)


ROUTERS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "Qwen3MoeTopKRouter": _softmax_weights,
    "Qwen3_5MoeTopKRouter": _softmax_weights,
    "Glm4MoeTopkRouter": _sigmoid_weights,
}
"""Class of a router that returns (logits, weights, chosen experts) -> how its weights follow from its logits."""


class RoutingReplay:
    """Hooks behind the routers of a model. Without routers it does nothing."""

    def __init__(self, model: Any) -> None:
        self.flipped: float | Tensor = 0.0
        self.replayed: float | Tensor = 0.0
        self.recorded: dict[int, Tensor] | None = None
        self._experts: Tensor | None = None
        self.layers: list[int] = []
        for name, module in model.named_modules():
            weights = ROUTERS.get(type(module).__name__)
            if weights is not None:
                layer = int(name.split("layers.")[1].split(".")[0])
                self.layers.append(layer)
                module.register_forward_hook(self._hook(layer, weights))
        self._depth = int(getattr(model.config, "num_hidden_layers", 0))

    def use(self, experts_TLK: Tensor | None) -> None:
        """Choices for the next forward passes, flattened tokens first; None: the routers' own."""
        if experts_TLK is not None and experts_TLK.shape[1] not in (len(self.layers), self._depth):
            raise TrainerError(
                f"routing was recorded for {experts_TLK.shape[1]} layers; this model has {len(self.layers)} "
                f"mixture-of-experts layers among {self._depth}: is it the engine's model?"
            )
        self._experts = experts_TLK

    def experts(self) -> NDArray[np.int64]:
        """What the last forward pass chose while `recorded` was a dictionary: (tokens, layers, k)."""
        recorded = self.recorded or {}
        return torch.stack([recorded[layer] for layer in self.layers], dim=1).cpu().numpy().astype(np.int64)

    def _hook(self, layer: int, weights_of: Callable[[Any, Tensor, Tensor], Tensor]) -> Any:
        def hook(router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, own = output
            if self.recorded is not None:
                self.recorded[layer] = own.detach()
            if self._experts is None:
                return output
            at = layer if self._experts.shape[1] == self._depth else self.layers.index(layer)
            wanted = self._experts[:, at].to(own.device)
            known = (wanted >= 0).all(-1, keepdim=True)
            chosen = torch.where(known, wanted, own)
            self._count(known.squeeze(-1), chosen, own)
            return logits, weights_of(router, logits, chosen).to(weights.dtype), chosen

        return hook

    def _count(self, known: Tensor, chosen: Tensor, own: Tensor) -> None:
        differ = (chosen.sort(-1)[0] != own.sort(-1)[0]).any(-1)
        self.flipped = self.flipped + (differ & known).sum()
        self.replayed = self.replayed + known.sum()

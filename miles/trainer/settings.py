"""Settings of what runs inside the ranks. Apart from their classes, so that the driver imports no torch."""

from typing import Literal

from pydantic import Field

from miles.config import Config
from miles.types import WeightVersion

__all__ = ["BackendConfig", "OptimConfig", "PolicyLossConfig", "StepSpec"]


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


class OptimConfig(Config):
    """One optimizer and its schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon on 2-D weights that are not embeddings, AdamW on the rest."""
    lr: float = Field(1e-6, gt=0.0)
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear rise from 0."""
    decay_steps: int = Field(0, ge=0)
    """Steps over which the rate falls linearly to final_lr_ratio; 0: constant."""
    final_lr_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Share of lr at the end of the decay."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Decoupled weight decay."""
    beta1: float = 0.9
    """AdamW's first moment."""
    beta2: float = 0.95
    """AdamW's second moment."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients are scaled down to this norm."""


class BackendConfig(Config):
    """How the model is held and computed."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and reductions are float32."""
    micro_tokens: int = Field(8192, gt=0)
    """Padded tokens of one forward pass."""
    threads: int = Field(1, gt=0)
    """CPU threads of a rank."""


class StepSpec(Config):
    """What one optimizer step minimises."""

    loss: Literal["policy", "sft"]
    """Clipped policy gradient, or negative log-likelihood."""
    policy: PolicyLossConfig = PolicyLossConfig()
    """Settings of the policy loss."""
    temperature: float = Field(1.0, gt=0.0)
    """The temperature that tokens were sampled at."""
    version: WeightVersion = 0
    """The version that the weights have before the step."""

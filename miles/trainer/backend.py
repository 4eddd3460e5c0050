"""The trainer's backend contract: five methods, the same on every rank."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from miles.config import Config
from miles.trainer.losses import PolicyLossConfig
from miles.trainer.optim import OptimConfig
from miles.trainer.rows import Row
from miles.types import WeightVersion

__all__ = ["Backend", "BackendConfig", "StepSpec"]


class BackendConfig(Config):
    """How the model is held and computed."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and reductions are float32."""
    micro_tokens: int = Field(8192, gt=0)
    """Padded tokens of one forward pass."""
    threads: int = Field(1, gt=0)
    """CPU threads of a rank."""
    seed: int = 0
    """Seed of every rank's generators."""


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


class Backend(Protocol):
    """One rank. Collective: every rank calls the same methods in the same order."""

    def init(self, model: Path, config: BackendConfig, *, rank: int, world: int) -> None:
        """Load a Hugging Face model directory and shard it."""
        ...

    def score(self, batches: Sequence[Sequence[Row]], *, temperature: float) -> list[list[list[float]]]:
        """Logprobs under the present weights: [micro-batch][row][token], 0.0 for each row's first token."""
        ...

    def step(self, batches: Sequence[Sequence[Row]], spec: StepSpec, optim: OptimConfig) -> dict[str, float]:
        """Forward, backward, clip, update. A new `optim` starts a new optimizer. Global metrics on every rank."""
        ...

    def weights(self, since: WeightVersion | None = None) -> Iterator[tuple[str, Any]]:
        """(HF name, full tensor) of every parameter; tensors are meaningful on rank 0."""
        ...

    def save(self, directory: Path) -> None:
        """Model, optimizer, schedule, generators: all that `load` needs to go on bit by bit."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        ...

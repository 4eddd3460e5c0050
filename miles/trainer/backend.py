"""The trainer's backend contract: five methods, the same on every rank."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from miles.trainer.rows import Row
from miles.trainer.settings import BackendConfig, OptimConfig, StepSpec
from miles.types import WeightVersion

__all__ = ["Backend"]


class Backend(Protocol):
    """One rank. Collective: every rank calls the same methods in the same order."""

    def init(self, model: Path, config: BackendConfig, *, rank: int, world: int, seed: int = 0) -> None:
        """Load a Hugging Face model directory and shard it."""
        ...

    def score(self, batches: Sequence[Sequence[Row]], *, temperature: float) -> list[list[list[float]]]:
        """Logprobs under the present weights: [micro-batch][row][token], 0.0 for each row's first token."""
        ...

    def step(self, batches: Sequence[Sequence[Row]], spec: StepSpec, optim: OptimConfig) -> dict[str, float]:
        """Forward, backward, clip, update; global metrics. Another loss or kind of optimizer starts a new one."""
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

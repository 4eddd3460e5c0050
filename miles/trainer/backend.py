"""The trainer's backend contract: what every rank of one model can do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from miles.trainer.data.packing import Costs, MicroBatch
from miles.trainer.settings import BackendConfig, OptimConfig, ScoreSpec, StepSpec

__all__ = ["Backend", "BackendInfo", "Scores"]

Scores = dict[str, NDArray[Any]]
"""Of one row: `logprobs` (n,), and what else was asked: `top_ids`, `top_logprobs` (n, top), `candidates` (n, C);
of a critic `values` (n,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """What a loaded model can do. `note` says why it does not pack, or that its head is computed whole."""

    packs: bool
    note: str = ""
    costs: Costs = field(default_factory=Costs)
    routers: int = 0
    parameters: int = 0
    trainable: int = 0


class Backend(Protocol):
    """One rank of one model. Collective: every rank calls the same methods in the same order."""

    def init(
        self, model: Path, config: BackendConfig, *, rank: int, world: int, seed: int = 0, critic: bool = False
    ) -> BackendInfo:
        """Load a Hugging Face model directory and shard it. A critic gets a head of one value per position."""
        ...

    def score(self, batches: Sequence[MicroBatch], ask: ScoreSpec) -> list[list[Scores]]:
        """Answers under the present weights: [micro-batch][row]. Rows with a track `candidate_ids` get `candidates`."""
        ...

    def step(self, batches: Sequence[MicroBatch], spec: StepSpec, optim: OptimConfig) -> dict[str, float]:
        """Forward, backward, clip, update; global metrics. Another loss or kind of optimizer starts a new one."""
        ...

    def weights(self, kind: Literal["full", "adapter"] = "full") -> Iterator[tuple[str, Any]]:
        """(name, full tensor), meaningful on rank 0: HF names with the adapter merged in, or the adapter in peft's."""
        ...

    def save(self, directory: Path) -> Any:
        """Begin to write all that `load` needs to go on bit by bit: a Future, done when this rank's part is written."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, on any number of ranks."""
        ...

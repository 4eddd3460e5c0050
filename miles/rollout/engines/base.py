"""What an inference engine must do for Miles, whatever serves it."""

from collections.abc import Callable
from typing import Protocol

from miles.types import Generated, GenerateRequest, Weights, WeightVersion

__all__ = ["Engine", "OnTokens"]

OnTokens = Callable[[tuple[int, ...]], None]
"""Called with the output ids so far while a generation goes on."""


class Engine(Protocol):
    """Token ids in, token ids out, with logprobs and the weight version of every sampled token.

    A class named in a recipe is made as `cls(model_directory, temperature=…, seed=…)`; logprobs are those of the
    distribution that was sampled, temperature included.
    """

    @property
    def version(self) -> WeightVersion:
        """The weights that new generations are sampled with."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    async def start(self) -> None:
        """Return when a generation would be answered."""
        ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generated:
        """Sample. Cancelling the call aborts the generation.

        Raises EngineLost when the server died (retryable), EngineError when it refused.
        """
        ...

    async def load(self, weights: Weights) -> float:
        """Serve new weights from now on without dropping requests in flight; seconds in which sampling stood still."""
        ...

    def release(self, session: str) -> None:
        """A session has ended: what the engine keeps for its next turn may go."""
        ...

    async def close(self) -> None:
        """Leave no process behind."""
        ...

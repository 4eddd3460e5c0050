"""The embedded engine's core in this very process: for debuggers, notebooks and weights passed by value."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from miles.errors import EngineError
from miles.rollout.engines.base import OnTokens
from miles.rollout.engines.embedded import EmbeddedConfig, context_length_of
from miles.types import Generated, GenerateRequest, Weights, WeightVersion

__all__ = ["InProcessEngine"]


class InProcessEngine:
    """One batching loop in a thread of this process. `load` takes tensors by value, or a directory."""

    def __init__(
        self, model: Path, config: EmbeddedConfig | None = None, *, temperature: float = 1.0, seed: int = 0
    ) -> None:
        self.config = config or EmbeddedConfig()
        self._model, self._temperature, self._seed = model, temperature, seed
        self._version: WeightVersion = 0
        self._ids = itertools.count()
        self._core: Any = None
        self._context_length = context_length_of(model, self.config)

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def context_length(self) -> int:
        return self._context_length

    async def start(self) -> None:
        self._core = await asyncio.to_thread(self._build)

    def _build(self) -> Any:
        from miles.rollout.engines.continuous import ContinuousEngine

        settings = self.config.model_dump(exclude={"restarts"})
        return ContinuousEngine(self._model, temperature=self._temperature, seed=self._seed, **settings)

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generated:
        loop, name = asyncio.get_running_loop(), f"{next(self._ids)}-{request.id}"
        answer: asyncio.Future[Generated] = loop.create_future()

        def settle(value: Any, last: bool, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error if isinstance(error, EngineError) else EngineError(str(error)))
            elif last:
                answer.set_result(value)
            elif on_tokens is not None:
                on_tokens(value)

        def reply(value: Any = None, *, last: bool = True, error: BaseException | None = None) -> None:
            loop.call_soon_threadsafe(settle, value, last, error)

        self._core.generate(
            reply,
            id=name,
            prompt_ids=list(request.prompt_ids),
            max_tokens=request.max_tokens,
            stop=list(request.stop_token_ids),
            streaming=on_tokens is not None,
        )
        try:
            return await answer
        except asyncio.CancelledError:
            self._core.abort(name)
            raise

    async def load(self, weights: Weights) -> float:
        if weights.tensors is not None:
            pause_s: float = await asyncio.to_thread(self._core.load_tensors, weights.tensors, weights.version)
        else:
            pause_s = await asyncio.to_thread(self._core.load_published, weights)
        self._version = weights.version
        return pause_s

    def release(self, session: str) -> None:
        """Nothing is kept for sessions here."""

    async def close(self) -> None:
        if self._core is not None:
            await asyncio.to_thread(self._core.close)
            self._core = None

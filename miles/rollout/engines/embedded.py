"""The embedded engine: continuous batching in its own process, for laptops, tests and small models."""

import asyncio
import contextlib
import itertools
import logging
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from miles.config import Config
from miles.errors import ConfigError, EngineError, EngineLost
from miles.processes import Worker
from miles.rollout.engines.base import OnTokens
from miles.types import Generated, GenerateRequest, Weights, WeightVersion

__all__ = ["EmbeddedConfig", "EmbeddedEngine", "context_length_of"]

log = logging.getLogger(__name__)
_ABORT_S = 5.0  # an engine that does not even take an abort is not waited for


class EmbeddedConfig(Config):
    """Sizes of the batching loop. The defaults suit models below 10 M parameters on two cores."""

    max_batch_requests: int = Field(32, gt=0)
    """Requests decoded together; more is slower on a CPU."""
    max_batch_tokens: int = Field(512, gt=0)
    """Tokens of one forward pass, prefill included."""
    page_size: int = Field(16, ge=4)
    """Tokens of one cache page, the unit of prefix sharing."""
    cache_tokens: int = Field(32_768, gt=1024)
    """Tokens of keys and values kept; one conversation cannot be longer than this less max_batch_tokens."""
    on_update: Literal["recompute", "keep"] = "recompute"
    """Requests in flight at a weight update: prefill again under the new weights, or keep old keys and values."""
    threads: int = Field(1, gt=0)
    """CPU threads of the engine process."""
    restarts: int = Field(3, ge=0)
    """How often a dead engine process is replaced before the run stops."""


class EmbeddedEngine:
    """Client of one engine process; replaces the process when it dies, at the last published weights."""

    def __init__(
        self,
        model: Path,
        log_dir: Path,
        config: EmbeddedConfig | None = None,
        *,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.config = config or EmbeddedConfig()
        self.deaths = 0
        self._model, self._log_dir = model, log_dir
        self._temperature, self._seed = temperature, seed
        self._weights = Weights(version=0)
        self._worker: Worker | None = None
        self._starting: asyncio.Task[Worker] | None = None
        self._ids = itertools.count()
        self._context_length = context_length_of(model, self.config)

    @property
    def version(self) -> WeightVersion:
        return self._weights.version

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return self._worker.pid if self._worker else None

    async def start(self) -> None:
        await self._ready()

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generated:
        worker = await self._ready()
        engine_id = f"{next(self._ids)}-{request.id}"  # the batching loop needs names that were never used before
        call = worker.call(
            "generate",
            on_item=on_tokens,
            id=engine_id,
            prompt_ids=list(request.prompt_ids),
            max_tokens=request.max_tokens,
            stop=list(request.stop_token_ids),
            streaming=on_tokens is not None,
        )
        try:
            generated: Generated = await call
        except asyncio.CancelledError:
            if not worker.ended.is_set():
                with contextlib.suppress(TimeoutError, EngineError):
                    await asyncio.wait_for(worker.call("abort", id=engine_id), _ABORT_S)
            raise
        return generated

    async def load(self, weights: Weights) -> float:
        if weights.directory is None and weights.broadcast is None:
            raise EngineError("the embedded engine process loads weights from a directory: publish.kind=safetensors")
        self._weights = weights
        worker = await self._ready()
        try:
            pause_s: float = await worker.call("load_published", weights=weights)
        except EngineLost:
            if weights.broadcast is not None:
                raise
            await self._ready()  # a fresh process starts at self._weights
            return 0.0
        return pause_s

    def release(self, session: str) -> None:
        """Nothing is kept for sessions here."""

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()

    async def _ready(self) -> Worker:
        if self._worker is not None and not self._worker.ended.is_set():
            return self._worker
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._spawn())
        return await asyncio.shield(self._starting)

    async def _spawn(self) -> Worker:
        if self._worker is not None:
            await self._worker.close(grace_s=0)
            self._worker = None
            self.deaths += 1
            log.warning("embedded engine died (%d of %d restarts used)", self.deaths, self.config.restarts)
        if self._weights.broadcast is not None:
            raise EngineError(
                f"the embedded engine died, and weights that were broadcast cannot be loaded again; read "
                f"{self._log_dir / 'engine.log'}, and set publish.kind=delta where engines may have to restart"
            )
        if self.deaths > self.config.restarts:
            raise EngineError(
                f"the embedded engine died {self.deaths} times; read {self._log_dir / 'engine.log'} "
                "and raise engine.embedded.restarts only if the cause is known"
            )
        settings = {
            "temperature": self._temperature,
            "seed": self._seed,
            **self.config.model_dump(exclude={"restarts"}),
        }
        worker = await Worker.start(
            "miles.rollout.engines.continuous:ContinuousEngine",
            {
                "model": str(self._model),
                "temperature": self._temperature,
                "seed": self._seed,
                "exit_when_dead": True,
                **settings,
            },
            name="embedded engine",
            log=self._log_dir / "engine.log",
            failed=EngineError,
            lost=EngineLost,
            env={"OMP_NUM_THREADS": str(self.config.threads)},
        )
        try:
            if self._weights.directory is not None:
                await worker.call("load_published", weights=self._weights)
        except BaseException:
            self.deaths += 1
            await worker.close(grace_s=0)
            raise
        self._worker = worker
        return worker


def context_length_of(model: Path, settings: EmbeddedConfig) -> int:
    """Longest sequence that the model and the cache both hold; ConfigError when `model` is no model directory."""
    import json

    path = model / "config.json"
    if not path.is_file():
        raise ConfigError(f"{model} is not a model directory: it has no config.json")
    config: dict[str, Any] = json.loads(path.read_text())
    return min(int(config.get("max_position_embeddings") or 32_768), settings.cache_tokens - settings.max_batch_tokens)

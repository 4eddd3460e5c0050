"""Publishing: make a version of the weights, have every engine confirm it, forget what nobody needs any more."""

import asyncio
import json
import logging
import shutil
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from miles.config import Config
from miles.errors import EngineLost, TrainerError
from miles.processes import scratch_folder
from miles.trainer.trainer import Trainer
from miles.types import BroadcastPlan, Weights, WeightSink, WeightVersion

__all__ = ["PublishConfig", "Publisher"]

log = logging.getLogger(__name__)
_TRIES = 3  # of a broadcast whose engines come and go


class PublishConfig(Config):
    """How weights reach the engines."""

    kind: Literal["safetensors", "delta", "broadcast", "inprocess"] = "safetensors"
    """safetensors: a directory in memory (or `directory`). delta: files of what changed (delta-v1), now and then all.
    broadcast: over a process group (gloo or NCCL) from the trainer's first rank.
    inprocess: by value, needs trainer.ranks=0. An adapter is always published whole."""
    directory: Path | None = None
    """Where snapshots are written; by default a temporary directory in shared memory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the published weights."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """broadcast: gloo for engines on CPUs or on the trainer's GPU, nccl for engines on GPUs of their own."""
    full_every: int = Field(20, gt=0)
    """delta: versions from one whole directory to the next; sooner when the deltas outgrow a third of one."""


class Publisher:
    """Publishes version after version; keeps what a restarted engine needs to load the newest one."""

    def __init__(self, trainer: Trainer, sink: WeightSink, config: PublishConfig | None = None) -> None:
        self.config = config or PublishConfig()
        self._trainer, self._sink = trainer, sink
        shared = Path("/dev/shm")
        parent = self.config.directory or (shared if shared.is_dir() else None)
        self._root = scratch_folder("weights", parent)
        self._snapshot: Path | None = None
        self._deltas: list[Path] = []
        self._delta_bytes = self._full_bytes = 0
        self._last: WeightVersion = -1
        self._plan: BroadcastPlan | None = None
        self._members: tuple[int, int] = (0, 0)
        self._one_at_a_time = asyncio.Lock()
        self.stepping = asyncio.Lock()
        """Held from an optimizer step to the publishing of what it made: the weights have no version meanwhile."""

    async def publish(self, version: WeightVersion) -> dict[str, float]:
        """Return when every engine serves `version`. Seconds: publish_s in all, transfer_s to write and hand over,
        pause_s in which sampling stood still; publish_bytes, where they are known; the engines' own counters."""
        async with self._one_at_a_time:
            metrics = await self._publish(version)
        counters: Callable[[], dict[str, float]] | None = getattr(self._sink, "counters", None)
        return metrics | (counters() if counters else {})

    async def again(self) -> None:
        """Broadcast the present version once more, to engines that came up since."""
        async with self.stepping, self._one_at_a_time:
            if self._last >= 0 and self.config.kind == "broadcast":
                await self._publish(self._last)

    async def _publish(self, version: WeightVersion) -> dict[str, float]:
        began = time.monotonic()
        metrics: dict[str, float] = {}
        if self.config.kind == "broadcast":
            weights, pause_s = await self._broadcast(version)
        else:
            if self.config.kind == "inprocess":
                weights = await self._trainer.tensors(version)
            elif self.config.kind == "delta" and self._trainer.config.compute.lora is None:
                weights, metrics = await self._changes(version)
            else:
                directory = self._root / f"v{version:06d}"
                weights = await self._trainer.weights(version, directory, dtype=self.config.dtype)
                metrics["publish_bytes"] = float(_size(directory))
            pause_s = await self._sink.load(weights)
        self._last = version
        self._forget(weights)
        seconds = time.monotonic() - began
        return metrics | {"publish_s": seconds, "pause_s": pause_s, "transfer_s": seconds - pause_s}

    async def _broadcast_plan(self) -> BroadcastPlan:
        ask: Callable[[], Awaitable[tuple[int, int]]] | None = getattr(self._sink, "receivers", None)
        members = await ask() if ask else (1, 0)
        if self._plan is None or members != self._members:
            self._members = members
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            settings: dict[str, Any] = {"dtype": self.config.dtype, "backend": self.config.backend}
            self._plan = await self._trainer.plan(f"miles-weights-{port}", port, receivers=members[0], **settings)
        return self._plan

    async def _broadcast(self, version: WeightVersion) -> tuple[Weights, float]:
        """Have the engines receive while the trainer sends; again with those that are there then, when some came or
        went, or died of it. What was sent, and the seconds that sampling stood still."""
        for _ in range(_TRIES):
            weights = Weights(version=version, broadcast=await self._broadcast_plan())
            try:
                return weights, await self._both_halves(weights)
            except EngineLost as error:
                log.warning("version %d was not broadcast: %s", version, error)
                self._plan, problem = None, str(error)
        raise TrainerError(f"the weights could not be broadcast: {problem}; set publish.kind=delta to go on without")

    async def _both_halves(self, weights: Weights) -> float:
        """One try. The trainer's half always ends by itself, and is waited for: a trainer that is left in the middle
        of sending could not save its work. Engines may wait for each other, so their half is ended with it."""
        loading = asyncio.ensure_future(self._sink.load(weights))

        async def sending() -> None:
            assert weights.broadcast is not None
            if problem := await self._trainer.broadcast(weights.broadcast):
                loading.cancel()
                raise EngineLost(problem)

        pause_s, error = await asyncio.gather(loading, sending(), return_exceptions=True)
        if isinstance(pause_s, Exception):
            raise pause_s
        if error is not None:
            raise error
        assert isinstance(pause_s, float)
        return pause_s

    async def _changes(self, version: WeightVersion) -> tuple[Weights, dict[str, float]]:
        """A delta on the version before, or a whole directory when it is time for one."""
        directory, path = self._root / f"v{version:06d}", self._root / f"v{version:06d}.delta"
        due = len(self._deltas) >= self.config.full_every - 1 or self._delta_bytes * 3 > self._full_bytes
        base = -1 if self._snapshot is None or due else self._last
        facts: dict[str, Any] | None = await self._trainer.delta(
            version, directory, path, dtype=self.config.dtype, base=base
        )
        if facts is None:
            size = self._full_bytes = _size(directory)
            self._delta_bytes = 0
            weights, changed = Weights(version=version, directory=directory), 1.0
        else:
            size = facts["bytes"]
            self._delta_bytes += size
            weights = Weights(version=version, directory=self._snapshot, deltas=(*self._deltas, path))
            changed = facts["changed"] / max(1, facts["elements"])
        self._point_at(weights)
        return weights, {"publish_bytes": float(size), "publish_changed": changed}

    def _point_at(self, weights: Weights) -> None:
        """Write LATEST, for receivers that watch the directory: it names only files that are complete."""
        latest = {
            "version": weights.version,
            "snapshot": weights.directory.name if weights.directory else None,
            "deltas": [path.name for path in weights.deltas],
        }
        partial = self._root / "LATEST.partial"
        partial.write_text(json.dumps(latest))
        partial.replace(self._root / "LATEST")

    def _forget(self, weights: Weights) -> None:
        """Delete what the newest version does not rest on."""
        if self._snapshot is not None and self._snapshot != weights.directory:
            shutil.rmtree(self._snapshot, ignore_errors=True)
        for path in self._deltas:
            if path not in weights.deltas:
                path.unlink(missing_ok=True)
        self._snapshot, self._deltas = weights.directory, list(weights.deltas)

    def close(self) -> None:
        """Delete the snapshots."""
        shutil.rmtree(self._root, ignore_errors=True)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))

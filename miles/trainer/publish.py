"""Publishing: make a snapshot of the weights, have every engine confirm it, forget the one before."""

import shutil
import time
from pathlib import Path
from typing import Literal

from miles.config import Config
from miles.processes import scratch_folder
from miles.trainer.trainer import Trainer
from miles.types import WeightSink, WeightVersion

__all__ = ["PublishConfig", "Publisher"]


class PublishConfig(Config):
    """How weights reach the engines."""

    kind: Literal["safetensors", "inprocess"] = "safetensors"
    """safetensors: a directory in memory (or `directory`); inprocess: by value, needs trainer.ranks=0."""
    directory: Path | None = None
    """Where snapshots are written; by default a temporary directory in shared memory."""


class Publisher:
    """Writes version after version; keeps the newest snapshot, which a restarted engine loads."""

    def __init__(self, trainer: Trainer, sink: WeightSink, config: PublishConfig | None = None) -> None:
        self.config = config or PublishConfig()
        self._trainer, self._sink = trainer, sink
        shared = Path("/dev/shm")
        parent = self.config.directory or (shared if shared.is_dir() else None)
        self._root = scratch_folder("weights", parent)
        self._before: Path | None = None

    async def publish(self, version: WeightVersion) -> float:
        """Return the seconds until every engine serves `version`."""
        began = time.monotonic()
        if self.config.kind == "inprocess":
            await self._sink.load(await self._trainer.tensors(version))
            return time.monotonic() - began
        directory = self._root / f"v{version:06d}"
        await self._sink.load(await self._trainer.weights(version, directory))
        if self._before is not None and self._before != directory:
            shutil.rmtree(self._before, ignore_errors=True)
        self._before = directory
        return time.monotonic() - began

    def close(self) -> None:
        """Delete the snapshots."""
        shutil.rmtree(self._root, ignore_errors=True)

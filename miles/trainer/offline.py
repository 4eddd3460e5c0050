"""Training on a file instead of episodes: supervised fine-tuning and preferences (DPO). No engine, no sandbox."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from miles.config import Config
from miles.errors import ConfigError
from miles.runs import RunFolder
from miles.trainer.checkpoints import Checkpoints
from miles.trainer.data.batch import normalize
from miles.trainer.data.credit import with_tracks
from miles.trainer.data.rows import Row
from miles.trainer.settings import DpoConfig, OptimConfig, ScoreSpec, StepSpec
from miles.trainer.trainer import Trainer
from miles.types import Reporter

__all__ = ["OfflineConfig", "OfflineDriver"]


class OfflineConfig(Config):
    """A file to learn from. `steps` optimizer steps go over it as often as that takes, shuffled anew each time."""

    path: Path
    """JSON lines. sft: {"messages": […], "tools": […]}; an assistant message with "train": false is not learned.
    dpo: {"prompt": [messages], "chosen": [messages], "rejected": [messages], "tools": […]}."""
    loss: Literal["sft", "dpo"] = "sft"
    """Imitate conversations, or prefer some to others."""
    steps: int = Field(100, gt=0)
    """Optimizer steps."""
    batch: int = Field(32, gt=0)
    """Conversations, or pairs, of one step."""
    held_out: int = Field(0, ge=0)
    """Last lines of the file that are not trained on; their loss is the evaluation."""
    eval_every: int = Field(50, gt=0)
    """Steps between two evaluations."""
    save_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(2, gt=0)
    """Checkpoints kept."""
    dpo: DpoConfig = DpoConfig()
    """Settings of DPO."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """The optimizer."""


Unit = tuple[Row, ...]
"""What one line of the file is: a conversation, or a pair (chosen, rejected)."""


class OfflineDriver:
    """Steps over units of rows. `stop` ends it after the step that is under way, with a checkpoint."""

    def __init__(
        self,
        trainer: Trainer,
        units: Sequence[Unit],
        folder: RunFolder,
        reporter: Reporter,
        config: OfflineConfig,
        *,
        seed: int = 0,
        step: int = 0,
    ) -> None:
        if len(units) <= config.held_out:
            raise ConfigError(
                f"{config.path} has {len(units)} lines and offline.held_out={config.held_out}: nothing is left to train"
            )
        self.step = step
        self.stop = asyncio.Event()
        self.config = config
        self._trainer, self._folder, self._reporter, self._seed = trainer, folder, reporter, seed
        cut = len(units) - config.held_out
        self._units, self._held_out = list(units[:cut]), list(units[cut:])
        self._checkpoints = Checkpoints(
            trainer, folder, keep=config.keep_checkpoints, tell=self._tell, every=config.save_every
        )

    async def train(self) -> None:
        """From the present step to the last one."""
        await self.evaluate()
        while self.step < self.config.steps and not self.stop.is_set():
            began = time.monotonic()
            rows = await self._with_reference([row for unit in self._batch() for row in unit])
            spec = StepSpec(loss=self.config.loss, dpo=self.config.dpo)
            metrics = await self._trainer.step(self._scaled(rows), spec, self.config.optim)
            self.step += 1
            tokens = sum(row.n_owned for row in rows)
            speed = {"tokens_per_s": tokens / (time.monotonic() - began)}
            self._tell("supervised", {"step": self.step, "steps": self.config.steps, **metrics, **speed})
            await self._now_and_then()
        await self.evaluate()

    async def evaluate(self) -> None:
        """Mean loss of the held-out lines: per token, or per pair."""
        if not self._held_out:
            return
        rows = [row for at, unit in enumerate(self._held_out) for row in _named(unit, str(at))]
        scores = await self._trainer.score(rows)
        if self.config.loss == "sft":
            tokens = sum(row.n_owned for row in rows)
            loss = -sum(float(score["logprobs"].sum()) for score in scores) / max(1, tokens)
            self._tell("held_out", {"step": self.step, "loss": loss, "tokens": tokens})
            return
        references = await self._trainer.score(rows, role="reference")
        sums = [float((s["logprobs"] - r["logprobs"]).sum()) for s, r in zip(scores, references, strict=True)]
        margins = self.config.dpo.beta * (np.array(sums[0::2]) - np.array(sums[1::2]))
        smooth = self.config.dpo.label_smoothing
        losses = (1 - smooth) * np.logaddexp(0, -margins) + smooth * np.logaddexp(0, margins)
        found = {"loss": float(losses.mean()), "accuracy": float((margins > 0).mean())}
        self._tell("held_out", {"step": self.step, **found, "pairs": len(margins)})

    async def save(self, *, wait: bool = True) -> Path | None:
        """Write a checkpoint; its path when it is complete."""
        return await self._checkpoints.begin(self.step, {"step": self.step, "warm_start": 0}, wait=wait)

    async def _now_and_then(self) -> None:
        last = self.step >= self.config.steps
        await self._checkpoints.complete()
        if self.step % self.config.eval_every == 0 and not last:
            await self.evaluate()
        if self._checkpoints.due(self.step) and not last:
            await self.save(wait=False)

    def _batch(self) -> list[Unit]:
        """The step's units: a place in the endless sequence of shuffled passes, so a resumed run goes on in it."""
        n = len(self._units)
        places = range(self.step * self.config.batch, (self.step + 1) * self.config.batch)
        return [_named(self._units[_shuffled(self._seed, at // n, n)[at % n]], str(at)) for at in places]

    async def _with_reference(self, rows: list[Row]) -> list[Row]:
        if self.config.loss != "dpo":
            return rows
        scores = await self._trainer.score(rows, ScoreSpec(), role="reference")
        return [with_tracks(row, reference=score["logprobs"]) for row, score in zip(rows, scores, strict=True)]

    def _scaled(self, rows: list[Row]) -> list[Row]:
        if self.config.loss == "sft":
            return normalize(rows, {"": sum(row.n_owned for row in rows)}, unit="token")
        return normalize(rows, {row.pair: 1 for row in rows}, unit="constant")  # a pair's loss stands at one token

    def _tell(self, kind: str, data: Mapping[str, Any]) -> None:
        self._folder.log(kind, data)
        self._reporter.event(kind, data)


@lru_cache(maxsize=2)  # a batch may lie across two passes
def _shuffled(seed: int, epoch: int, n: int) -> list[int]:
    """The order of one pass."""
    order = list(range(n))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _named(unit: Unit, name: str) -> Unit:
    """A pair's rows with its name, and which of them is to be preferred."""
    if len(unit) == 1:
        return unit
    signs = zip(unit, (1.0, -1.0), strict=True)
    paired = [with_tracks(row, sign=np.full(row.n_owned, sign, dtype=np.float32)) for row, sign in signs]
    return tuple(replace(row, episode=name, group=name, pair=name) for row in paired)

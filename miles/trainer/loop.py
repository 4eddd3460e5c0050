"""The driver. Reads like the algorithm: take groups, step, publish, tell, now and then evaluate and save."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field

from miles.config import Config
from miles.errors import TrainerError
from miles.runs import RunFolder
from miles.trainer.batch import Batch, LossUnit, build_batch, logprob_difference, normalize
from miles.trainer.publish import Publisher
from miles.trainer.rows import Row
from miles.trainer.settings import OptimConfig, PolicyLossConfig, StepSpec
from miles.trainer.trainer import Trainer
from miles.types import Evaluator, Group, GroupSource, Reporter

__all__ = ["Driver", "TrainConfig", "WarmStartConfig"]


_WITNESSES = 16  # rows that still compare logprobs in a step that has nothing to train


class WarmStartConfig(Config):
    """Supervised steps on the taskset's demonstrations before the first episode."""

    steps: int = Field(0, ge=0)
    """How many; 0: none."""
    batch: int = Field(32, gt=0)
    """Conversations of one step."""
    optim: OptimConfig = OptimConfig(lr=1e-3)
    """The optimizer of the warm start."""


class TrainConfig(Config):
    """The reinforcement learning itself."""

    steps: int = Field(100, ge=0)
    """Optimizer steps of the whole run."""
    loss_unit: LossUnit = "episode"
    """What weighs equally in the loss: episode, token, group, or constant (Dr. GRPO)."""
    loss_constant: float = Field(1024.0, gt=0.0)
    """Tokens that stand for one episode when loss_unit is constant."""
    divide_by_std: bool = True
    """Whether advantages are divided by the group's standard deviation."""
    policy: PolicyLossConfig = PolicyLossConfig()
    """The policy loss."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    save_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end or when stopped."""
    keep_checkpoints: int = Field(2, gt=0)
    """Checkpoints kept."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised steps before."""


class Driver:
    """One run's training. `stop` ends it after the step that is under way, with a checkpoint."""

    def __init__(
        self,
        trainer: Trainer,
        source: GroupSource,
        publisher: Publisher,
        evaluator: Evaluator,
        folder: RunFolder,
        reporter: Reporter,
        config: TrainConfig,
        *,
        groups_per_step: int,
        temperature: float = 1.0,
        eval_every: int = 0,
        step: int = 0,
        warmed: int = 0,
    ) -> None:
        self.step, self.warmed = step, warmed
        self.stop = asyncio.Event()
        self._trainer, self._source, self._publisher, self._evaluator = trainer, source, publisher, evaluator
        self._folder, self._reporter, self.config = folder, reporter, config
        self._groups_per_step, self._temperature, self._eval_every = groups_per_step, temperature, eval_every

    async def train(self) -> None:
        """From the present step to the last one. Publishes the present weights first."""
        await self._publish()
        if self.step == 0:
            await self.evaluate()
        idle_since = time.monotonic()
        while self.step < self.config.steps and (groups := await self._take()) is not None:
            wait_s = time.monotonic() - idle_since
            metrics = await self._train_on(groups)
            step_s = time.monotonic() - idle_since
            idle_since += step_s
            metrics |= {"wait_s": wait_s, "step_s": step_s, "trainer_idle": wait_s / step_s}
            metrics["tokens_per_s"] = metrics.get("sampled_tokens", 0.0) / step_s
            self._tell(
                "step",
                {"step": self.step, "steps": self.config.steps, "groups": [group.id for group in groups], **metrics},
            )
            await self._now_and_then()
        if not self.stop.is_set():
            await self.evaluate()

    async def warm_start(self, rows: Iterator[Row]) -> None:
        """Supervised steps up to the configured number; `rows` are all demonstrations, from the first one."""
        config = self.config.warm_start
        rows = islice(rows, self.warmed * config.batch, None)
        coming = asyncio.create_task(asyncio.to_thread(lambda: list(islice(rows, config.batch))))
        while self.warmed < config.steps:
            batch = await coming
            coming = asyncio.create_task(asyncio.to_thread(lambda: list(islice(rows, config.batch))))
            if not batch:
                raise TrainerError(
                    "warm_start needs demonstrations, and the taskset has none: set train.warm_start.steps=0"
                )
            owned = {"": sum(row.n_owned for row in batch)}
            scaled = normalize(batch, owned, unit="token")
            metrics = await self._trainer.step(scaled, StepSpec(loss="sft"), config.optim)
            self.warmed += 1
            self._tell("warm_start", {"step": self.warmed, "steps": config.steps, **metrics})
            if self.stop.is_set():
                break
        await coming

    async def evaluate(self) -> None:
        """Measure the version that is being served now."""
        self._reporter.event("evaluating", {"step": self.step})
        result = await self._unless_stopped(self._evaluator.evaluate(self.step))
        if result is not None:
            self._tell("eval", {"step": self.step, **result})

    async def save(self) -> Path:
        """Write a checkpoint: model, optimizer, data cursor, a loadable HF directory."""
        partial = self._folder.new_checkpoint(self.step)
        await self._trainer.save(partial)
        await self._trainer.weights(self.step, partial / "hf")
        state = {"step": self.step, "warm_start": self.warmed, "source": self._source.state()}
        path = self._folder.finish_checkpoint(partial, state, keep=self.config.keep_checkpoints)
        self._tell("checkpoint", {"step": self.step, "path": str(path)})
        return path

    async def _train_on(self, groups: list[Group]) -> dict[str, float]:
        began = time.monotonic()
        batch = await asyncio.to_thread(self._batch, groups)
        spec = StepSpec(loss="policy", policy=self.config.policy, temperature=self._temperature, version=self.step)
        trained = await self._trainer.step(batch.rows, spec, self.config.optim)
        if not batch.rows and (witnesses := batch.flat[:_WITNESSES]):
            scores = await self._trainer.score(witnesses, temperature=self._temperature)
            trained |= logprob_difference(witnesses, scores, version=self.step)
        self.step += 1
        train_s = time.monotonic() - began
        publish_s = await self._publish()
        timings = {"train_s": train_s, "publish_s": publish_s}
        return {**batch.metrics, **trained, **self._source.counters(), **timings}

    def _batch(self, groups: list[Group]) -> Batch:
        config = self.config
        return build_batch(
            groups,
            version=self.step,
            unit=config.loss_unit,
            constant=config.loss_constant,
            divide_by_std=config.divide_by_std,
        )

    async def _publish(self) -> float:
        seconds = await self._publisher.publish(self.step)
        self._source.advance(self.step)
        return seconds

    async def _now_and_then(self) -> None:
        last = self.step >= self.config.steps
        if self._eval_every and self.step % self._eval_every == 0 and not last:
            await self.evaluate()
        if self.config.save_every and self.step % self.config.save_every == 0 and not last:
            await self.save()

    async def _take(self) -> list[Group] | None:
        """The next step's groups; None when the run was told to stop."""
        if self.stop.is_set():  # groups may be waiting already: the wish to stop comes first
            return None
        groups: list[Group] | None = await self._unless_stopped(self._source.take(self._groups_per_step))
        return groups

    async def _unless_stopped(self, work: Any) -> Any:
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for future in (task, stopped):
                future.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    def _tell(self, kind: str, data: Mapping[str, Any]) -> None:
        self._folder.log(kind, data)
        self._reporter.event(kind, data)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The driver's part of a checkpoint: step and data cursor."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return state

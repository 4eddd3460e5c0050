"""The driver. Reads like the algorithm: take groups, step, publish, tell, now and then evaluate and save."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field

from miles.config import Config
from miles.errors import TrainerError
from miles.runs import RunFolder
from miles.trainer.algorithms.metrics import joined
from miles.trainer.checkpoints import Checkpoints
from miles.trainer.data.batch import Batch, Part, build_batch, logprob_difference, normalize
from miles.trainer.data.credit import is_live
from miles.trainer.data.rows import Row
from miles.trainer.enrich import Enricher
from miles.trainer.publish import Publisher
from miles.trainer.settings import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    DistillConfig,
    KlConfig,
    LossUnit,
    OptimConfig,
    PolicyLossConfig,
    ScoreSpec,
    StepSpec,
)
from miles.trainer.trainer import Trainer
from miles.types import Evaluator, Group, GroupSource, Reporter

__all__ = ["Driver", "TrainConfig", "WarmStartConfig"]


log = logging.getLogger(__name__)
_ANOTHER_MODEL = 1.0  # mean difference of logprobs that no rounding makes
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
    """Batches of the whole run; each ends with a published version."""
    minibatches: int = Field(1, gt=0)
    """Optimizer steps of one batch; its groups are dealt to them. More than 1 asks for correction.anchor=recomputed."""
    loss_unit: LossUnit = "episode"
    """What weighs equally in the loss: episode, token, group, or constant (Dr. GRPO)."""
    loss_constant: float = Field(1024.0, gt=0.0)
    """Tokens that stand for one episode when loss_unit is constant."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    policy: PolicyLossConfig = PolicyLossConfig()
    """The policy loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy corrections."""
    kl: KlConfig = KlConfig()
    """Distance to a reference."""
    distill: DistillConfig = DistillConfig()
    """On-policy distillation."""
    critic: CriticConfig = CriticConfig()
    """The critic of PPO."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    routing_probe: int = Field(0, ge=0)
    """Rows of each batch that are scored with and without routing replay, to see what it changes."""
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
        self._doubted = False
        self._trainer, self._source, self._publisher, self._evaluator = trainer, source, publisher, evaluator
        self._folder, self._reporter, self.config = folder, reporter, config
        self._groups_per_step, self._temperature, self._eval_every = groups_per_step, temperature, eval_every
        self._checkpoints = Checkpoints(
            trainer, folder, keep=config.keep_checkpoints, tell=self._tell, every=config.save_every
        )
        self._enricher = Enricher(
            trainer,
            advantage=config.advantage,
            correction=config.correction,
            kl=config.kl,
            distill=config.distill,
            temperature=temperature,
        )

    async def train(self) -> None:
        """From the present step to the last one. Publishes the present weights first."""
        await self._publish()
        if self.step == 0:
            await self.evaluate()
        idle_since = time.monotonic()
        while self.step < self.config.steps and (groups := await self._take()) is not None:
            wait_s = time.monotonic() - idle_since
            metrics = await self._train_on(groups)
            self._doubt(metrics)
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

    async def save(self, *, wait: bool = True) -> Path | None:
        """Write a checkpoint: model, optimizer, data cursor, buffered groups, a loadable HF directory.

        Its path when it is complete; with wait=False it is completed in the background, while steps go on.
        """
        state = {"step": self.step, "warm_start": self.warmed, "source": self._source.state()}
        return await self._checkpoints.begin(self.step, state, wait=wait)

    async def _train_on(self, groups: list[Group]) -> dict[str, float]:
        began = time.monotonic()
        config = self.config
        batch = await asyncio.to_thread(
            build_batch, groups, config.advantage, version=self.step, steps=config.minibatches
        )
        batch = await self._enricher.enrich(batch, {group.id: group.task_id for group in groups})
        enriched = time.monotonic()
        probed = await self._probe_routing(batch)
        async with self._publisher.stepping:
            parts = []
            for number, part in enumerate(batch.parts):
                # After the first step the weights are not those that sampled: no difference to the engine to measure.
                policy = await self._step_policy(part, version=self.step if number == 0 else -1)
                parts.append(policy | await self._step_critic(part))
            trained = probed | joined(parts)
            self.step += 1
            self._source.trained()
            train_s = time.monotonic() - began
            published = await self._publish()
        timings = {"train_s": train_s, "score_s": enriched - began, **published}
        return {**batch.metrics, **trained, **self._source.counters(), **timings}

    def _doubt(self, metrics: Mapping[str, float]) -> None:
        """Say once that the engine serves another model than the one that is trained: rounding differs by far less."""
        apart = metrics.get("logprob_diff/mean", 0.0)
        if apart > _ANOTHER_MODEL and not self._doubted:
            self._doubted = True
            log.warning(
                "the engine's logprobs are %.1f away from the trainer's on average: it serves other weights than those "
                "that it was given, or another model (docs/engines.md, known traps)",
                apart,
            )

    async def _step_policy(self, part: Part, *, version: int) -> dict[str, float]:
        """One optimizer step. Rows without advantage are not computed where nothing else would train them."""
        config = self.config
        rows = normalize(part.rows, part.owned_of, part.owned_in, unit=config.loss_unit, constant=config.loss_constant)
        others = (
            (config.kl.coefficient and config.kl.place == "loss")
            or config.policy.entropy
            or (config.distill.coefficient and config.distill.on == "candidates")
        )
        live = rows if others else [row for row in rows if is_live(row)]
        if self._critic_only:
            live = []
        spec = StepSpec(
            loss="policy",
            policy=config.policy,
            correction=config.correction,
            kl=config.kl,
            distill=config.distill.coefficient if config.distill.on == "candidates" else 0.0,
            temperature=self._temperature,
            version=version,
        )
        trained = await self._trainer.step(live, spec, config.optim)
        if not live and version == self.step and (witnesses := rows[:_WITNESSES]):
            trained |= await self._difference(witnesses, ScoreSpec(temperature=self._temperature))
        return trained

    async def _step_critic(self, part: Part) -> dict[str, float]:
        if self.config.advantage.estimator != "gae":
            return {}
        rows = normalize(part.rows, part.owned_of, unit="token")
        critic = self.config.critic
        metrics = await self._trainer.step(
            rows, StepSpec(loss="value", value_clip=critic.value_clip), critic.optim, role="critic"
        )
        return {name: value for name, value in metrics.items() if name.startswith("critic/")}

    @property
    def _critic_only(self) -> bool:
        return self.config.advantage.estimator == "gae" and self.step < self.config.critic.warmup_steps

    async def _probe_routing(self, batch: Batch) -> dict[str, float]:
        """How far from the engine a few rows are, with recorded routing and with the router's own."""
        rows = [row for row in batch.rows if row.routing][: self.config.routing_probe]
        if not rows:
            return {}
        found: dict[str, float] = {}
        for name, replay in (("replay", True), ("own", False)):
            ask = ScoreSpec(temperature=self._temperature, replay=replay)
            difference = await self._difference(rows, ask)
            found[f"routing/diff_{name}"] = difference.get("logprob_diff/mean", 0.0)
            found[f"routing/kl_{name}"] = difference.get("logprob_diff/kl", 0.0)
        return found

    async def _difference(self, rows: list[Row], ask: ScoreSpec) -> dict[str, float]:
        scores = await self._trainer.score(rows, ask)
        return logprob_difference(rows, [score["logprobs"] for score in scores], version=self.step)

    async def _publish(self) -> dict[str, float]:
        metrics = await self._publisher.publish(self.step)
        self._source.advance(self.step)
        return metrics

    async def _now_and_then(self) -> None:
        last = self.step >= self.config.steps
        await self._checkpoints.complete()
        if self._eval_every and self.step % self._eval_every == 0 and not last:
            await self.evaluate()
        if self._checkpoints.due(self.step) and not last:
            await self.save(wait=False)

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

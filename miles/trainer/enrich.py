"""What a batch must know before it is trained: opinions of the reference, teachers, critic, the policy itself."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from miles.trainer.backend import Scores
from miles.trainer.data.batch import Batch
from miles.trainer.data.credit import (
    generalized_advantages,
    kl_penalty,
    teacher_credit,
    whitened,
    with_tracks,
)
from miles.trainer.data.rows import Row
from miles.trainer.settings import AdvantageConfig, CorrectionConfig, DistillConfig, KlConfig, ScoreSpec
from miles.trainer.teachers import Teachers
from miles.trainer.trainer import Trainer

__all__ = ["Enricher"]


class Enricher:
    """Scores rows and turns the scores into tracks and credit, in the order in which they build on each other."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        advantage: AdvantageConfig,
        correction: CorrectionConfig,
        kl: KlConfig,
        distill: DistillConfig,
        temperature: float,
    ) -> None:
        self._trainer, self._temperature = trainer, temperature
        self._advantage, self._correction, self._kl, self._distill = advantage, correction, kl, distill
        self._teachers = Teachers(trainer, distill)

    async def enrich(self, batch: Batch, tasks: Mapping[str, str]) -> Batch:
        """The batch with every track that its losses will ask for. `tasks` names each group's task."""
        rows = batch.rows
        ask = ScoreSpec(temperature=self._temperature)
        if self._correction.anchor == "recomputed":
            rows = _tracked(rows, await self._trainer.score(rows, ask), anchor="logprobs")
        if self._kl.coefficient:
            own_experts = self._kl.reference is None  # recorded choices mean nothing to another model
            near = ask.model_copy(update={"replay": own_experts})
            rows = _tracked(rows, await self._trainer.score(rows, near, role="reference"), reference="logprobs")
            if self._kl.place == "reward":
                rows = [kl_penalty(row, self._kl.coefficient) for row in rows]
        if self._distill.coefficient:
            rows = await self._taught(rows, [tasks.get(row.group, "") for row in rows])
        if self._advantage.estimator == "gae":
            rows = _tracked(rows, await self._trainer.score(rows, ask, role="critic"), values="values")
            settings = {"discount": self._advantage.discount, "decay": self._advantage.gae_lambda}
            rows = [generalized_advantages(row, **settings) for row in rows]
        if self._advantage.whiten:
            rows = whitened(rows)
        fresh = iter(rows)
        return replace(batch, parts=[replace(part, rows=[next(fresh) for _ in part.rows]) for part in batch.parts])

    async def _taught(self, rows: list[Row], tasks: list[str]) -> list[Row]:
        config = self._distill
        ask = ScoreSpec(temperature=self._temperature)
        if config.on == "sampled":
            found = await self._teachers.score(rows, tasks, ask)
            rows = [
                row if s is None else with_tracks(row, teacher=s["logprobs"])
                for row, s in zip(rows, found, strict=True)
            ]
            return [teacher_credit(row, config.coefficient) for row in rows]
        top = ask.model_copy(update={"top": config.candidates})
        if config.chosen_by == "teacher":
            found = await self._teachers.score(rows, tasks, top)
            return [_candidates(row, s, config.candidates) for row, s in zip(rows, found, strict=True)]
        own = await self._trainer.score(rows, top)
        rows = [with_tracks(row, candidate_ids=s["top_ids"]) for row, s in zip(rows, own, strict=True)]
        found = await self._teachers.score(rows, tasks, ask)
        return [_judged(row, scores) for row, scores in zip(rows, found, strict=True)]


def _tracked(rows: Sequence[Row], scores: Sequence[Scores], **names: str) -> list[Row]:
    """Rows with tracks taken from scores: track=key of the score."""
    pairs = zip(rows, scores, strict=True)
    return [with_tracks(row, **{track: found[key] for track, key in names.items()}) for row, found in pairs]


def _candidates(row: Row, scores: Scores | None, count: int) -> Row:
    if scores is not None:
        return with_tracks(row, candidate_ids=scores["top_ids"], candidate_logprobs=scores["top_logprobs"])
    shape = (row.n_owned, count)
    return with_tracks(
        row, candidate_ids=np.zeros(shape, dtype=np.int64), candidate_logprobs=np.full(shape, np.nan, dtype=np.float32)
    )


def _judged(row: Row, scores: Scores | None) -> Row:
    ids = row.tracks["candidate_ids"]
    unknown = np.full(ids.shape, np.nan, dtype=np.float32)  # no teacher for this task: no divergence
    return with_tracks(row, candidate_logprobs=unknown if scores is None else scores["candidates"])

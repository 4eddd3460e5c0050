"""Teachers of on-policy distillation: a model beside the policy, or a running SGLang server."""

import asyncio
import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import numpy as np

from miles.errors import TrainerError
from miles.http import Http, Unreachable
from miles.trainer.backend import Scores
from miles.trainer.data.rows import Row
from miles.trainer.settings import DistillConfig, ScoreSpec
from miles.trainer.trainer import Trainer

__all__ = ["HttpTeacher", "LocalTeacher", "Teacher", "Teachers"]


log = logging.getLogger(__name__)


class Teacher(Protocol):
    """Scores owned tokens: `logprobs` (n,), and with ask.top its likeliest tokens."""

    async def score(self, rows: Sequence[Row], ask: ScoreSpec) -> list[Scores]: ...


class LocalTeacher:
    """A frozen model on the trainer's ranks."""

    def __init__(self, trainer: Trainer, role: str) -> None:
        self._trainer, self._role = trainer, role

    async def score(self, rows: Sequence[Row], ask: ScoreSpec) -> list[Scores]:
        return await self._trainer.score(rows, ask, role=self._role)


class HttpTeacher:
    """An SGLang server that reads whole rows and answers with their tokens' logprobs (at temperature 1)."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, at_once: int = 32) -> None:
        self.url = url.rstrip("/")
        self._timeout_s, self._at_once = timeout_s, asyncio.Semaphore(at_once)

    async def score(self, rows: Sequence[Row], ask: ScoreSpec) -> list[Scores]:
        http = Http(self.url, silence_s=self._timeout_s)
        try:
            return list(await asyncio.gather(*(self._score(http, row, ask) for row in rows)))
        finally:
            await http.close()

    async def _score(self, http: Http, row: Row, ask: ScoreSpec) -> Scores:
        body = {
            "input_ids": row.ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": ask.top,
        }
        try:
            async with self._at_once:
                reply = await http.post("/generate", body)
            meta = reply.json()["meta_info"]
        except (Unreachable, LookupError, TypeError, ValueError) as error:
            raise TrainerError(f"the teacher at {self.url} did not score a row: {error}; is the server up?") from error
        return self._of_meta(row, meta, ask.top)

    def _of_meta(self, row: Row, meta: dict[str, Any], top: int) -> Scores:
        """Entries are [logprob, id, text] for every token of the prompt; the first has no logprob."""
        entries = meta.get("input_token_logprobs") or []
        if [entry[1] for entry in entries] != row.ids.tolist():
            raise TrainerError(
                f"the teacher at {self.url} scored other tokens than it was asked: is its vocabulary ours?"
            )
        owned = np.flatnonzero(row.owned)
        scores = {"logprobs": np.array([entries[at][0] for at in owned], dtype=np.float32)}
        if top:
            likeliest = meta["input_top_logprobs"]
            pairs = [sorted(likeliest[at], key=lambda entry: -entry[0])[:top] for at in owned]
            scores["top_ids"] = np.array([[entry[1] for entry in few] for few in pairs], dtype=np.int64)
            scores["top_logprobs"] = np.array([[entry[0] for entry in few] for few in pairs], dtype=np.float32)
        return scores


class Teachers:
    """All teachers of a run; each row is scored by the first whose tasks fit."""

    def __init__(self, trainer: Trainer, config: DistillConfig) -> None:
        self.config = config
        self._warned = False
        self._teachers: dict[str, Teacher] = {
            name: HttpTeacher(teacher.url) if teacher.url else LocalTeacher(trainer, f"teacher:{name}")
            for name, teacher in config.teachers.items()
        }

    async def score(self, rows: Sequence[Row], tasks: Sequence[str], ask: ScoreSpec) -> list[Scores | None]:
        """One answer a row; None where no teacher is asked about its task."""
        answers: list[Scores | None] = [None] * len(rows)
        asked = [self._name_of(task) for task in tasks]
        if asked and not any(asked) and not self._warned:
            self._warned = True
            log.warning("no teacher fits any task of this batch, as %r: look at train.distill.teachers", tasks[:1])
        for name, teacher in self._teachers.items():
            mine = [at for at, other in enumerate(asked) if other == name]
            for at, found in zip(mine, await teacher.score([rows[at] for at in mine], ask), strict=True):
                answers[at] = found
        return answers

    def _name_of(self, task: str) -> str | None:
        fits = (name for name, teacher in self.config.teachers.items() if fnmatchcase(task, teacher.tasks))
        return next(fits, None)

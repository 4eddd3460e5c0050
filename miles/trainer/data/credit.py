"""Credit per token, on top of the episode's advantage: distance to a reference, a teacher's opinion, a critic's.

All functions take rows whose tracks have been scored and return new rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.trainer.data.rows import Row

__all__ = ["credit_of", "generalized_advantages", "is_live", "kl_penalty", "teacher_credit", "whitened", "with_tracks"]


def with_tracks(row: Row, **tracks: NDArray[Any]) -> Row:
    """The row with tracks added or replaced."""
    return replace(row, tracks={**row.tracks, **tracks})


def kl_penalty(row: Row, coefficient: float) -> Row:
    """Take coefficient * (logprob - reference logprob) off every token: k1 of KL(policy, reference) as a cost."""
    return _credited(row, -coefficient * (row.logprobs - row.tracks["reference"]))


def teacher_credit(row: Row, coefficient: float) -> Row:
    """Add coefficient * (teacher's logprob - logprob): the reverse KL to the teacher on the sampled tokens. The track
    `teacher` is used up: of the batch's other rows, some may have no teacher.

    On-policy distillation: arXiv 2306.13649, with the student's own samples and the sampled estimate of its gradient.
    """
    if "teacher" not in row.tracks:
        return row
    credited = _credited(row, coefficient * (row.tracks["teacher"] - row.logprobs))
    return replace(credited, tracks={name: track for name, track in credited.tracks.items() if name != "teacher"})


def generalized_advantages(row: Row, *, discount: float, decay: float) -> Row:
    """Advantages by GAE (arXiv 1506.02438, eq. 16) from the track `values`; `returns` is what the critic should learn.

    The row's owned tokens are the time steps, whatever lies between them; its advantage is the reward at the last one,
    and credit is reward on the way. After the last token the value is 0.
    """
    values = row.tracks["values"].astype(np.float64)
    rewards = credit_of(row).astype(np.float64)
    rewards[-1:] += row.advantage
    advantages = np.zeros_like(rewards)
    later = value_after = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        later = rewards[t] + discount * value_after - values[t] + discount * decay * later
        advantages[t], value_after = later, values[t]
    tracks = {
        "credit": advantages.astype(np.float32),
        "returns": (advantages + values).astype(np.float32),
        "values_before": values.astype(np.float32),
    }
    return replace(with_tracks(row, **tracks), advantage=0.0)


def whitened(rows: Sequence[Row]) -> list[Row]:
    """Token advantages with mean 0 and standard deviation 1 over all rows."""
    if not rows:
        return []
    every = np.concatenate([row.advantage + credit_of(row) for row in rows])
    mean, std = every.mean(), every.std() + 1e-6
    return [
        replace(with_tracks(row, credit=(row.advantage + credit_of(row) - mean) / std), advantage=0.0) for row in rows
    ]


def is_live(row: Row) -> bool:
    """Whether any token of the row has an advantage."""
    return row.advantage != 0.0 or bool(credit_of(row).any())


def _credited(row: Row, amount: NDArray[Any]) -> Row:
    return with_tracks(row, credit=(credit_of(row) + amount).astype(np.float32))


def credit_of(row: Row) -> NDArray[np.float32]:
    """(n,) what the row's tokens have on top of its advantage."""
    credit: NDArray[np.float32] | None = row.tracks.get("credit")
    return np.zeros(row.n_owned, dtype=np.float32) if credit is None else credit

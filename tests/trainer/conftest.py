"""Rows, scales and tiny models of several architectures for the trainer's tests."""

import random

import numpy as np
import torch

from miles.trainer.data.batch import normalize
from miles.trainer.data.rows import Row


def rows_of(seed, lengths=(20, 31, 8, 15, 27, 5, 12, 30), *, shared=0, vocabulary=400):
    """Rows of episodes e0, e1, …; each begins with four tokens that are only context, `shared` of them the same."""
    rng = random.Random(seed)
    stem = [rng.randrange(vocabulary) for _ in range(shared)]
    rows = []
    for number, n in enumerate(lengths):
        owned = [(place >= 4 and rng.random() < 0.8) or place == n - 1 for place in range(n)]
        rows.append(
            Row(
                ids=[*stem, *(rng.randrange(vocabulary) for _ in range(n))],
                owned=[False] * shared + owned,
                logprobs=[-6.0 - rng.random() for own in owned if own],
                versions=[1] * sum(owned),
                episode=f"e{number}",
                group=f"g{number // 4}",
                advantage=rng.choice([-1.0, 0.5, 1.0]),
            )
        )
    return rows


def scaled(rows, unit="episode"):
    owned = {}
    for row in rows:
        owned[row.episode] = owned.get(row.episode, 0) + row.n_owned
    return normalize(rows, owned, unit=unit, constant=50.0)


def plain_logprobs(plain, row, temperature=1.0):
    """(n,) logprobs of a row's owned tokens by a Hugging Face model as it is."""
    ids = torch.from_numpy(row.ids)
    logprobs = torch.log_softmax(plain(input_ids=ids[None]).logits[0, :-1].float() / temperature, -1)
    return logprobs.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(row.owned[1:])]


def assert_same_scores(scores, expected, key="logprobs", atol=1e-5):
    for one, other in zip(scores, expected, strict=True):
        assert np.allclose(one[key], other[key] if isinstance(other, dict) else other, atol=atol)

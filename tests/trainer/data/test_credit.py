import numpy as np
import pytest

from miles.trainer.data.credit import generalized_advantages, is_live, kl_penalty, teacher_credit, whitened
from miles.trainer.data.rows import Row


def row(advantage=0.0, **tracks):
    n = len(next(iter(tracks.values()))) if tracks else 2
    return Row(
        ids=[1] * (n + 1),
        owned=[False] + [True] * n,
        logprobs=[-1.0] * n,
        versions=[0] * n,
        advantage=advantage,
        tracks={name: np.array(track, dtype=np.float32) for name, track in tracks.items()},
    )


def test_distance_to_the_reference_is_taken_off_each_token():
    assert kl_penalty(row(reference=[-1.5, -1.0]), 0.1).tracks["credit"].tolist() == pytest.approx([-0.05, 0.0])


def test_a_teacher_that_likes_a_token_better_adds_credit_and_one_that_was_not_asked_nothing():
    credited = teacher_credit(row(teacher=[-0.5, -3.0]), 1.0)
    assert {name: track.tolist() for name, track in credited.tracks.items()} == {"credit": [0.5, -2.0]}
    assert "credit" not in teacher_credit(row(), 1.0).tracks


def test_advantages_by_gae_with_decay_one_are_reward_to_go_less_the_value():
    found = generalized_advantages(row(advantage=1.0, values=[0.25, 0.5, 0.75]), discount=1.0, decay=1.0)
    assert found.tracks["credit"].tolist() == [0.75, 0.5, 0.25]
    assert found.tracks["returns"].tolist() == [1.0, 1.0, 1.0]
    assert found.advantage == 0.0


def test_advantages_by_gae_with_decay_zero_are_one_step_differences():
    found = generalized_advantages(row(advantage=1.0, values=[0.25, 0.5, 0.75]), discount=0.5, decay=0.0)
    assert found.tracks["credit"].tolist() == [0.0, -0.125, 0.25]


def test_credit_on_the_way_is_reward_on_the_way():
    found = generalized_advantages(row(values=[0.0, 0.0], credit=[0.5, 0.0]), discount=1.0, decay=1.0)
    assert found.tracks["credit"].tolist() == [0.5, 0.0]


def test_whitened_advantages_have_mean_zero_and_deviation_one():
    rows = whitened([row(advantage=1.0, credit=[0.0, 1.0]), row(advantage=0.0, credit=[0.0, 0.0])])
    every = np.concatenate([r.tracks["credit"] for r in rows])
    assert (every.mean(), every.std()) == pytest.approx((0.0, 1.0), abs=1e-5)


def test_a_row_is_live_when_any_token_has_an_advantage():
    assert is_live(row(advantage=0.1))
    assert is_live(row(credit=[0.0, 0.1]))
    assert not is_live(row(credit=[0.0, 0.0]))

import math

import pytest
import torch

from miles.trainer.losses import policy_loss, sft_loss, token_logprobs
from miles.trainer.settings import PolicyLossConfig

WIDE = PolicyLossConfig(mask_low=0.0, mask_high=1e12)


def loss_of(new, old, advantage, owned=None, config=WIDE):
    new = torch.tensor([new], requires_grad=True)
    owned = torch.tensor([owned or [True] * new.shape[1]])
    loss, sums = policy_loss(new, torch.tensor([old]), torch.tensor([advantage]), owned, config)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    return loss[0].tolist(), gradient[0].tolist(), {name: float(v) for name, v in sums.items()}


def test_on_policy_the_gradient_is_minus_the_advantage():
    loss, gradient, sums = loss_of([-1.0, -2.0], [-1.0, -2.0], 0.5)
    assert loss == [-0.5, -0.5]
    assert gradient == [-0.5, -0.5]
    assert sums == {"clipped": 0.0, "masked": 0.0, "kl": 0.0}


def test_beyond_the_clip_range_there_is_no_gradient():
    loss, gradient, sums = loss_of([0.0], [-1.0], 1.0)
    assert loss == pytest.approx([-1.28])
    assert (gradient, sums["clipped"]) == ([0.0], 1.0)
    assert loss_of([-1.0], [0.0], -1.0)[0] == pytest.approx([0.8])


def test_a_huge_ratio_at_negative_advantage_is_bounded():
    loss, gradient, _ = loss_of([1000.0, 1.0], [0.0, -1.0], -1.0)
    assert loss == [3.0, 3.0]
    assert gradient == [0.0, 0.0]


def test_overflow_with_advantage_zero_is_exactly_zero():
    loss, gradient, _ = loss_of([1000.0, -1000.0, 100.0], [0.0, 0.0, 0.0], 0.0)
    assert [abs(x) for x in loss] == [0.0, 0.0, 0.0]
    assert all(math.isfinite(g) for g in gradient)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_stands_in_a_masked_slot_reaches_nothing(bad):
    for new, old in (([bad, -1.0], [0.0, -1.5]), ([0.0, -1.0], [bad, -1.5])):
        loss, gradient, sums = loss_of(new, old, 1.0, owned=[False, True])
        assert loss[0] == 0.0
        assert all(math.isfinite(x) for x in (*loss, *gradient, *sums.values()))
        assert sums["kl"] == pytest.approx(math.exp(0.5) - 1 - 0.5)


def test_tokens_too_far_off_policy_are_left_out_and_counted():
    loss, gradient, sums = loss_of([0.0, 0.0, -4.0], [0.0, -3.0, 0.0], 1.0, config=PolicyLossConfig())
    assert loss == [-1.0, 0.0, 0.0]
    assert gradient == [-1.0, 0.0, 0.0]
    assert sums["masked"] == 2.0


def test_nothing_owned_is_loss_zero_and_finite_gradients():
    loss, gradient, _ = loss_of([-1.0] * 4, [-1.0] * 4, 1.0, owned=[False] * 4)
    assert (loss, gradient) == ([0.0] * 4, [0.0] * 4)


def test_supervised_loss_is_the_negative_logprob_of_owned_tokens():
    loss, _ = sft_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([[False, True]]))
    assert loss.tolist() == [[0.0, 2.0]]


def test_logprobs_are_of_the_next_token_under_the_sampling_temperature():
    logits, ids = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = torch.log_softmax(logits / 0.7, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert torch.allclose(token_logprobs(logits, ids, 0.7), expected, atol=1e-6)

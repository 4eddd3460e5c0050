import math

import pytest
import torch

from miles.trainer.algorithms.losses import loss_of
from miles.trainer.algorithms.metrics import joined, step_metrics
from miles.trainer.algorithms.tokens import Tokens
from miles.trainer.settings import CorrectionConfig, DpoConfig, KlConfig, PolicyLossConfig, StepSpec

OFF = CorrectionConfig(mode="off")


def run(spec, new, old, advantages, rows=None, **tracks):
    """(loss per token, gradient per token, sums). `rows` are the row of every token; entropy etc. come as tracks."""
    new = torch.tensor(new, requires_grad=True)
    k = len(new)
    computed = {name: tracks.pop(name) for name in ("entropy", "candidates", "values") if name in tracks}
    row = torch.tensor(rows or [0] * k, dtype=torch.long)
    tokens = Tokens(
        logprobs=new,
        old=torch.tensor(old),
        advantages=torch.as_tensor(advantages, dtype=torch.float32).expand(k).clone(),
        scales=torch.ones(k),
        versions=torch.zeros(k, dtype=torch.long),
        row=row,
        rows=int(row.max()) + 1 if k else 0,
        tracks={name: torch.tensor(track) for name, track in tracks.items()},
        **computed,
    )
    loss, sums = loss_of(spec)(tokens, spec)
    (gradient,) = torch.autograd.grad(loss.sum(), new, allow_unused=True)
    gradient = [] if gradient is None else gradient.tolist()
    return loss.detach().tolist(), gradient, {name: float(v) for name, v in sums.items()}


def policy(correction=OFF, kl=None, distill=0.0, **settings):
    return StepSpec(
        loss="policy",
        policy=PolicyLossConfig(**settings),
        correction=correction,
        kl=kl or KlConfig(),
        distill=distill,
    )


def test_on_policy_every_loss_has_the_gradient_minus_the_advantage():
    for kind in ("ppo", "gspo", "cispo", "reinforce"):
        _, gradient, sums = run(policy(kind=kind), [-1.0, -2.0], [-1.0, -2.0], 0.5)
        assert gradient == pytest.approx([-0.5, -0.5])
        assert (sums.get("clipped", 0.0), sums["masked"], sums["kl"]) == (0.0, 0.0, 0.0)


def test_beyond_the_clip_range_ppo_has_no_gradient():
    loss, gradient, sums = run(policy(), [0.0], [-1.0], 1.0)
    assert loss == pytest.approx([-1.28])
    assert (gradient, sums["clipped"]) == ([0.0], 1.0)
    assert run(policy(), [-1.0], [0.0], -1.0)[0] == pytest.approx([0.8])


def test_a_huge_ratio_at_negative_advantage_is_bounded():
    loss, gradient, _ = run(policy(), [1000.0, 1.0], [0.0, -1.0], -1.0)
    assert loss == [3.0, 3.0]
    assert gradient == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_overflow_with_advantage_zero_is_exactly_zero_and_otherwise_finite(kind):
    new, old = [1000.0, -1000.0, 100.0], [0.0, 0.0, 0.0]
    loss, gradient, _ = run(policy(kind=kind), new, old, 0.0)
    assert [abs(x) for x in loss] == [0.0, 0.0, 0.0]
    assert all(math.isfinite(g) for g in gradient)
    loss, gradient, sums = run(policy(kind=kind), new, old, [1.0, -1.0, 1.0])
    assert all(math.isfinite(x) for x in (*loss, *gradient, *sums.values()))


def test_gspo_has_one_ratio_for_a_row():
    new, old = [-1.0, -1.0, -2.0], [-1.2, -1.0, -2.0]
    loss, gradient, _ = run(policy(kind="gspo"), new, old, 1.0, rows=[0, 0, 1])
    ratio = math.exp(0.1)
    assert loss == pytest.approx([-ratio, -ratio, -1.0])
    assert gradient == pytest.approx([-ratio, -ratio, -1.0])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    loss, gradient, sums = run(policy(kind="cispo"), [-0.5], [-1.5], 2.0)
    assert gradient == pytest.approx([-1.28 * 2.0])
    assert loss == pytest.approx([1.28 * 2.0 * 0.5])
    assert sums["clipped"] == 1.0


def test_gspo_leaves_out_of_the_rows_ratio_what_the_correction_leaves_out():
    new, old = [-1.0, -1.0, -19.0], [-1.0, -1.0, -1.0]
    loss, gradient, sums = run(policy(CorrectionConfig(), kind="gspo"), new, old, 1.0)
    assert loss == pytest.approx([-1.0, -1.0, 0.0])
    assert gradient == pytest.approx([-1.0, -1.0, 0.0])
    assert sums["used"] == 2.0


@pytest.mark.parametrize("kind", ["ppo", "gspo", "reinforce"])
def test_truncated_the_ratio_counts_up_to_the_limit_whatever_the_loss(kind):
    correction = CorrectionConfig(mode="truncate", high=2.0)
    spec = policy(correction, kind=kind, clip_high=100.0, dual_clip=1000.0)
    assert run(spec, [0.0], [-2.0], -1.0)[1] == pytest.approx([2.0])


def test_decoupled_the_weight_is_there_in_every_mode():
    for mode, weight in (("off", math.e**2), ("truncate", 3.0), ("mask", math.e**2)):
        correction = CorrectionConfig(anchor="recomputed", mode=mode, high=3.0 if mode == "truncate" else 9.0)
        assert run(policy(correction), [-1.0], [-3.0], 1.0, anchor=[-1.0])[0] == pytest.approx([-weight])


def test_reinforce_weighs_by_the_ratio_up_to_the_corrections_limit():
    cut = CorrectionConfig(mode="truncate", high=2.0)
    assert run(policy(cut, kind="reinforce"), [0.0], [-1.0], 1.0)[1] == pytest.approx([-2.0])
    assert run(policy(kind="reinforce"), [0.0], [-1.0], 1.0)[1] == pytest.approx([-math.e])


def test_a_loss_of_ones_own_is_named_by_module_and_attribute():
    spec = policy(kind="tests.trainer.algorithms.test_losses:twice")
    assert run(spec, [-1.0], [-1.0], 1.0)[0] == [2.0]


def twice(tokens, spec):
    return -2 * tokens.logprobs, {"mine": tokens.logprobs.detach().sum()}


def test_sums_of_ones_own_become_metrics_per_token():
    sums = run(policy(kind="tests.trainer.algorithms.test_losses:twice"), [-1.0, -3.0], [-1.0, -3.0], 1.0)[2]
    assert step_metrics(sums | {"tokens": 2.0, "loss": 0.0, "same": 0.0}, 0.0)["policy/mine"] == -2.0


def test_metrics_of_several_steps_are_added_or_averaged():
    one = {"tokens/trained": 4.0, "loss": 1.0, "logprob_diff/max": 0.1, "skipped_empty": 1.0}
    two = {"tokens/trained": 6.0, "loss": 2.0, "critic/error": 3.0}
    found = joined([one, two])
    assert found == {
        "tokens/trained": 10.0, "loss": 1.5, "logprob_diff/max": 0.1, "skipped_empty": 1.0, "critic/error": 3.0
    }  # fmt: skip


# corrections


def test_tokens_too_far_off_policy_are_left_out_and_counted():
    loss, gradient, sums = run(policy(CorrectionConfig()), [0.0, 0.0, -4.0], [0.0, -3.0, 0.0], 1.0)
    assert loss == [-1.0, 0.0, 0.0]
    assert gradient == [-1.0, 0.0, 0.0]
    assert sums["masked"] == 2.0


def test_a_row_can_be_masked_as_a_whole_by_its_mean():
    correction = CorrectionConfig(level="sequence", low=0.5, high=2.0)
    loss, _, sums = run(policy(correction), [0.0, 0.0, 0.0], [-2.0, 0.2, 0.0], 1.0, rows=[0, 0, 1])
    assert loss == [0.0, 0.0, -1.0]
    assert sums["masked"] == 2.0


def test_decoupled_the_ratio_is_to_the_recomputed_policy_and_the_weight_to_the_engines():
    correction = CorrectionConfig(anchor="recomputed", mode="truncate", high=1.5)
    loss, gradient, _ = run(policy(correction), [-1.0, -1.0], [-1.2, -2.0], 1.0, anchor=[-1.0, -1.0])
    assert loss == pytest.approx([-math.exp(0.2), -1.5])
    assert gradient == pytest.approx([-math.exp(0.2), -1.5])


@pytest.mark.parametrize("kind, kept", [("k1", [True, False]), ("k2", [True, False]), ("k3", [True, False])])
def test_tokens_are_rejected_by_their_distance(kind, kept):
    correction = CorrectionConfig(mode="off", reject=kind, reject_level="token", reject_above=0.3)
    loss, _, sums = run(policy(correction), [-1.0, -1.0], [-1.1, -2.0], 1.0)
    assert [value != 0.0 for value in loss] == kept
    assert sums["rejected"] == 1.0


def test_rows_are_rejected_by_the_mean_of_their_tokens():
    correction = CorrectionConfig(mode="off", reject="k1", reject_above=0.3)
    loss, _, _ = run(policy(correction), [0.0] * 4, [-0.5, 0.5, -0.5, -0.5], 1.0, rows=[0, 0, 1, 1])
    assert [value != 0.0 for value in loss] == [True, True, False, False]


def test_effective_samples_are_all_when_on_policy():
    def share(old):
        sums = run(policy(), [-1.0, -1.0], old, 1.0)[2] | {"tokens": 2.0, "loss": 0.0, "same": 0.0}
        return step_metrics(sums, 0.0)["policy/effective_samples"]

    assert share([-1.0, -1.0]) == pytest.approx(1.0)
    assert share([-1.0, -4.0]) == pytest.approx((1 + math.e**3) ** 2 / (2 * (1 + math.e**6)))


# additions


@pytest.mark.parametrize(
    "estimator, value, slope",
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5))],
)
def test_kl_to_the_reference_by_each_estimator(estimator, value, slope):
    spec = policy(kl=KlConfig(coefficient=2.0, estimator=estimator))
    loss, gradient, sums = run(spec, [-1.0], [-1.0], 0.0, reference=[-1.5])
    assert loss == pytest.approx([2 * value])
    assert gradient == pytest.approx([2 * slope])
    assert sums["kl_reference"] == pytest.approx(value)


def test_the_unbiased_estimator_weighs_k3_by_the_ratio():
    spec = policy(kl=KlConfig(coefficient=1.0, estimator="unbiased"))
    loss, gradient, _ = run(spec, [-1.0], [-1.2], 0.0, reference=[-1.5])
    k3, slope, ratio = math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5), math.exp(0.2)
    assert loss == pytest.approx([ratio * k3])
    assert gradient == pytest.approx([ratio * (k3 + slope)])


def test_entropy_is_a_bonus():
    loss, _, sums = run(policy(entropy=0.1), [-1.0], [-1.0], 0.0, entropy=torch.tensor([2.0]))
    assert loss == pytest.approx([-0.2])
    assert sums["entropy"] == 2.0


def test_divergence_over_candidates_is_zero_for_equal_policies_and_skips_what_was_not_scored():
    student = torch.log(torch.tensor([[0.5, 0.3], [0.5, 0.3]]))
    teacher = [[math.log(0.5), math.log(0.3)], [math.nan, math.nan]]
    spec = policy(distill=1.0)
    same = run(spec, [-1.0, -1.0], [-1.0, -1.0], 0.0, candidates=student, candidate_logprobs=teacher)[0]
    assert same == pytest.approx([0.0, 0.0], abs=1e-6)
    teacher[0] = [math.log(0.25), math.log(0.25)]
    expected = 0.5 * math.log(2) + 0.3 * math.log(0.3 / 0.25) + 0.2 * math.log(0.2 / 0.5)
    other = run(spec, [-1.0, -1.0], [-1.0, -1.0], 0.0, candidates=student, candidate_logprobs=teacher)[0]
    assert other == pytest.approx([expected, 0.0], abs=1e-6)


# other losses


def test_supervised_loss_is_the_negative_logprob():
    assert run(StepSpec(loss="sft"), [-1.0, -2.0], [0.0, 0.0], 0.0)[0] == [1.0, 2.0]


def test_dpo_prefers_the_chosen_row_of_each_pair():
    spec = StepSpec(loss="dpo", dpo=DpoConfig(beta=0.5))
    loss, gradient, sums = run(
        spec,
        [-1.0, -1.0, -3.0, -2.0, -2.0],
        [0.0] * 5,
        0.0,
        rows=[0, 0, 1, 2, 3],
        reference=[-1.5, -1.5, -2.0, -2.0, -2.0],
        pair=[0.0, 0.0, 0.0, 1.0, 1.0],
        sign=[1.0, 1.0, -1.0, 1.0, -1.0],
    )
    margin = 0.5 * (1.0 + 1.0)
    assert loss == pytest.approx([math.log(1 + math.exp(-margin)), 0.0, 0.0, math.log(2), 0.0])
    slope = 0.5 / (1 + math.exp(margin))
    assert gradient == pytest.approx([-slope, -slope, slope, -0.25, 0.25])
    assert (sums["pairs"], sums["preferred"], sums["margin"]) == (2.0, 1.0, 1.0)


def test_a_critic_learns_returns_and_gains_nothing_beyond_the_clip():
    values = torch.tensor([0.1, 1.0], requires_grad=True)
    spec = StepSpec(loss="value", value_clip=0.2)
    loss, _, sums = run(spec, [0.0, 0.0], [0.0, 0.0], 0.0, values=values, returns=[1.0, 1.0], values_before=[0.0, 0.0])
    assert loss == pytest.approx([0.5 * 0.81, 0.5 * 0.64])
    assert sums["value_error"] == pytest.approx(0.81)


def test_nothing_owned_is_loss_zero():
    for kind in ("ppo", "gspo", "cispo", "reinforce"):
        loss, gradient, sums = run(policy(CorrectionConfig(), kind=kind), [], [], 0.0)
        assert (loss, gradient) == ([], [])
        assert all(math.isfinite(value) for value in sums.values())

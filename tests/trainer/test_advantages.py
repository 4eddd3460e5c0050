import pytest

from miles.trainer.advantages import group_advantages, grpo
from miles.types import Discarded, Faulted, Tree
from tests.trees import group, turn


@pytest.mark.parametrize("rewards", [[0.3] * 7, [0.95] * 8, [0.1 + 0.2, 0.3, 0.3, 0.3], [1e6 + 0.1] * 4, [1.0], [0.0]])
def test_rewards_equal_but_for_rounding_have_no_advantage(rewards):
    assert grpo(rewards) == [0.0] * len(rewards)


def test_a_small_real_difference_counts():
    assert grpo([0.3, 0.3, 0.3, 0.31])[-1] == pytest.approx(1.5, abs=1e-3)


def test_mean_and_standard_deviation_are_of_the_group():
    assert grpo([1.0, 0.0, 1.0, 0.0], divide_by_std=False) == [0.5, -0.5, 0.5, -0.5]
    assert grpo([1.0, 0.0, 1.0, 0.0]) == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)


def test_an_episode_with_many_branches_weighs_as_one():
    bushy = Tree(turns=(turn(0, None, [1], [2]), *(turn(n, 0, [3], [4]) for n in (1, 2, 3))))
    pairs = group_advantages(group(0.0, 1.0, tree=bushy), divide_by_std=False)
    assert [value for _, value in pairs] == [-0.5, 0.5]


def test_infrastructure_failures_are_not_part_of_the_baseline_and_faults_are_zero():
    pairs = group_advantages(group(1.0, Discarded(reason="x"), Faulted(reason="y")), divide_by_std=False)
    assert [(e.index, value) for e, value in pairs] == [(0, 0.5), (2, -0.5)]
    assert group_advantages(group(Discarded(reason="x"))) == []

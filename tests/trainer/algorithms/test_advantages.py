import pytest

from miles.errors import ConfigError, TrainerError
from miles.trainer.algorithms.advantages import (
    dr_grpo,
    group_advantages,
    grpo,
    maxrl,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    shaped_reward,
)
from miles.trainer.settings import AdvantageConfig, OverlongConfig
from miles.types import Discarded, Faulted, Tree
from tests.trees import episode, group, turn

CENTRED = AdvantageConfig(estimator="dr_grpo")


@pytest.mark.parametrize("rewards", [[0.3] * 7, [0.95] * 8, [0.1 + 0.2, 0.3, 0.3, 0.3], [1e6 + 0.1] * 4, [1.0], [0.0]])
@pytest.mark.parametrize("estimate", [grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, maxrl])
def test_rewards_equal_but_for_rounding_have_no_advantage(estimate, rewards):
    assert estimate([rewards]) == [[0.0] * len(rewards)]
    assert group(*rewards).without_difference


def test_a_small_real_difference_counts():
    assert grpo([[0.3, 0.3, 0.3, 0.31]])[0][-1] == pytest.approx(1.5, abs=1e-3)
    assert not group(0.3, 0.3, 0.3, 0.31).without_difference


def test_each_estimator_by_hand():
    two = [[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    assert dr_grpo(two) == [[0.5, -0.5, 0.5, -0.5], [0.75, -0.25, -0.25, -0.25]]
    assert grpo(two)[0] == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)
    assert rloo(two)[1] == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert maxrl(two) == [[1.0, -1.0, 1.0, -1.0], [3.0, -1.0, -1.0, -1.0]]
    assert maxrl([[-1.0, 0.5]]) == [[0.0, 0.0]]
    # over all eight: mean 3/8, sample std sqrt(15/8/7)
    assert reinforce_pp(two)[0][:2] == pytest.approx([0.625 / 0.5175, -0.375 / 0.5175], abs=1e-3)
    # centred by group: 0.5 or 0.75 and so on; std of those sqrt(1.75/7)
    assert reinforce_pp_baseline(two)[1][:2] == pytest.approx([1.5, -0.5], abs=1e-3)


def test_an_episode_with_many_branches_weighs_as_one():
    bushy = Tree(turns=(turn(0, None, [1], [2]), *(turn(n, 0, [3], [4]) for n in (1, 2, 3))))
    (pairs,) = group_advantages([group(0.0, 1.0, tree=bushy)], CENTRED)
    assert [value for _, value in pairs] == [-0.5, 0.5]


def test_infrastructure_failures_are_not_part_of_the_baseline_and_faults_are_zero():
    groups = [group(1.0, Discarded(reason="x"), Faulted(reason="y")), group(Discarded(reason="x"))]
    first, second = group_advantages(groups, CENTRED)
    assert [(e.index, value) for e, value in first] == [(0, 0.5), (2, -0.5)]
    assert second == []


def test_groups_of_the_same_task_id_stay_apart():
    first, second = group_advantages([group(1.0, 0.0, id="a"), group(1.0, 1.0, id="b")], CENTRED)
    assert [v for _, v in first] == [0.5, -0.5]
    assert [v for _, v in second] == [0.0, 0.0]


def test_an_estimator_of_ones_own_is_named_by_module_and_attribute():
    config = AdvantageConfig(estimator="tests.trainer.algorithms.test_advantages:doubled")
    assert [v for _, v in group_advantages([group(1.0, 0.0)], config)[0]] == [2.0, 0.0]
    with pytest.raises(ConfigError, match="unknown advantage 'grop'; did you mean grpo"):
        group_advantages([group(1.0, 0.0)], AdvantageConfig(estimator="grop"))


def test_an_estimator_of_another_shape_is_named():
    config = AdvantageConfig(estimator="tests.trainer.algorithms.test_advantages:flat")
    with pytest.raises(TrainerError, match="must return one list for each of 2 groups"):
        group_advantages([group(1.0, 0.0), group(1.0, 0.0)], config)


def flat(rewards):
    return [1.0 for _ in rewards]


def doubled(rewards):
    return [[2 * reward for reward in group] for group in rewards]


@pytest.mark.parametrize("tokens, reward", [(80, 1.0), (90, 0.5), (100, 0.0), (500, 0.0)])
def test_length_is_paid_for_softly_up_to_the_limit(tokens, reward):
    tree = Tree(turns=(turn(0, None, [1], [2] * tokens),))
    config = OverlongConfig(limit=100, margin=20)
    assert shaped_reward(episode(1.0, tree=tree), config) == reward

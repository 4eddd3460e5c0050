from dataclasses import replace

import pytest

from miles.trainer.data.batch import build_batch, normalize
from miles.trainer.data.rows import Row
from miles.trainer.settings import AdvantageConfig, OverlongConfig
from miles.types import Discarded, Finish, Tree
from tests.trees import group, turn


def row(n, episode="e", of="g"):
    return Row(
        ids=[1] * (n + 1),
        owned=[False] + [True] * n,
        logprobs=[0.0] * n,
        versions=[0] * n,
        episode=episode,
        group=of,
    )


def build(*groups, version=3, steps=1, **settings):
    return build_batch(groups, AdvantageConfig(estimator="dr_grpo", **settings), version=version, steps=steps)


def test_each_unit_weighs_what_it_says():
    rows = [row(2, "a", "g"), row(4, "a", "g"), row(3, "b", "g"), row(1, "c", "h")]
    owned = {"a": 6, "b": 3, "c": 1, "d": 0}
    scales = {
        u: [r.scale for r in normalize(rows, owned, unit=u, constant=10.0)]
        for u in ("episode", "token", "group", "constant")
    }
    assert scales["episode"] == [1 / 24, 1 / 24, 1 / 12, 1 / 4]
    assert scales["token"] == [1 / 10] * 4
    assert scales["group"] == [1 / 18, 1 / 18, 1 / 18, 1 / 2]
    assert scales["constant"] == [1 / 40] * 4


def test_splitting_an_episode_into_rows_changes_no_weight():
    whole = normalize([row(6, "a")], {"a": 6}, unit="episode")
    split = normalize([row(1, "a"), row(2, "a"), row(3, "a")], {"a": 6}, unit="episode")
    assert {r.scale for r in split} == {whole[0].scale}


def test_groups_without_difference_count_in_the_denominators():
    batch = build(group(1.0, 1.0, id="flat"), group(1.0, 0.0, id="live"))
    (part,) = batch.parts
    assert {r.group: r.advantage for r in batch.rows if r.advantage <= 0} == {"flat": 0.0, "live": -0.5}
    assert len(part.owned_of) == 4
    assert part.owned_in == {"flat": 4, "live": 4}
    assert batch.metrics["groups/without_difference"] == 1
    assert batch.metrics["reward/mean"] == 0.75
    assert batch.metrics["episodes"] == 4


def test_discarded_episodes_are_nowhere():
    batch = build(group(1.0, Discarded(reason="x"), 0.0))
    assert batch.metrics["episodes"] == 2
    assert len(batch.rows) == 2


def test_staleness_is_measured_on_the_stored_versions():
    tree = Tree(turns=(turn(0, None, [1], [2, 3], version=1), turn(1, 0, [4], [5, 6], version=3)))
    metrics = build(group(1.0, 0.0, tree=tree)).metrics
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2.0)


def test_several_steps_share_the_groups_and_no_episode():
    batch = build(*(group(1.0, 0.0, id=f"g{n}") for n in range(5)), steps=2)
    assert [sorted(part.owned_in) for part in batch.parts] == [["g0", "g2", "g4"], ["g1", "g3"]]
    assert [len(part.owned_of) for part in batch.parts] == [6, 4]


def test_an_episode_that_was_cut_off_can_be_left_out_and_still_counts():
    cut = Tree(turns=(replace(turn(0, None, [1], [2, 3]), finish=Finish.LENGTH),))
    batch = build(group(1.0, 0.0, tree=cut), overlong=OverlongConfig(mask=True))
    assert batch.rows == []
    assert batch.parts[0].owned_of == {"g/0": 2, "g/1": 2}
    assert batch.metrics["episodes/overlong_masked"] == 2


def test_a_group_of_one_has_no_baseline_and_is_counted():
    batch = build(group(1.0))
    assert ([r.advantage for r in batch.rows], batch.metrics["groups/of_one"]) == ([0.0], 1.0)


def test_credit_per_turn_comes_from_a_function_of_ones_own():
    batch = build(group(1.0, 0.0), turn_credit="tests.trainer.data.test_batch:first_turn")
    assert batch.rows[0].tracks["credit"].tolist() == [0.25, 0.25]


def first_turn(episode):
    return {0: 0.25}


@pytest.mark.parametrize("unit", ["episode", "token", "group", "constant"])
def test_a_step_without_any_row_has_metrics(unit):
    batch = build(group(Discarded(reason="x")))
    (part,) = batch.parts
    assert normalize(part.rows, part.owned_of, part.owned_in, unit=unit) == []
    assert batch.metrics["episodes"] == 0

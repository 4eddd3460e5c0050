import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.trainer.batch import build_batch, micro_batches, normalize
from miles.trainer.rows import Row
from miles.types import Discarded, Tree
from tests.trees import group, turn


def row(n, episode="e", of="g"):
    return Row(
        ids=[1] * (n + 1),
        owned=[False] + [True] * n,
        logprobs=[0.0] * (n + 1),
        versions=[0] * (n + 1),
        episode=episode,
        group=of,
    )


def build(*groups, version=3, unit="episode"):
    return build_batch(groups, version=version, unit=unit, constant=10.0, divide_by_std=False)


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


def test_groups_without_difference_count_but_are_not_computed():
    batch = build(group(1.0, 1.0, id="flat"), group(1.0, 0.0, id="live"))
    assert {r.group for r in batch.rows} == {"live"}
    assert batch.rows[0].scale == 1 / (4 * 2)
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


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 4), st.integers(50, 200))
def test_every_row_is_computed_once_on_equally_many_micro_batches(lengths, ranks, tokens):
    rows = [row(n, str(i)) for i, n in enumerate(lengths)]
    shares = micro_batches(rows, ranks=ranks, tokens=tokens)
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) >= 1
    placed = [r.episode for share in shares for batch in share for r in batch]
    assert sorted(placed) == sorted(r.episode for r in rows)
    for share in shares:
        for batch in share:
            assert len(batch) * max((len(r.ids) for r in batch), default=0) <= tokens


def test_ranks_are_balanced():
    rows = [row(n) for n in range(10, 50)]
    sizes = [sum(len(r.ids) for b in share for r in b) for share in micro_batches(rows, ranks=2, tokens=10**6)]
    assert max(sizes) <= 1.05 * min(sizes)


def test_no_rows_is_one_empty_micro_batch_each():
    assert micro_batches([], ranks=2, tokens=10) == [[[]], [[]]]


@pytest.mark.parametrize("unit", ["episode", "token", "group", "constant"])
def test_a_step_without_any_row_has_metrics(unit):
    assert build(group(1.0, 1.0), unit=unit).rows == []

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.trainer.data.packing import Costs, micro_batches, token_ratio, trie
from miles.trainer.data.rows import Row


def row(ids, episode="e", pair=""):
    ids = list(ids)
    n = len(ids) - 1
    return Row(ids=ids, owned=[False] + [True] * n, logprobs=[0.0] * n, versions=[0] * n, episode=episode, pair=pair)


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@given(sequences)
def test_a_trie_holds_every_row_once_and_each_token_sees_its_own_past(lists):
    merged = trie([row(ids) for ids in lists])
    prefixes = {tuple(ids[: n + 1]) for ids in lists for n in range(len(ids))}
    assert len(merged.ids) == len(prefixes)
    places = np.arange(len(merged.ids))
    for ids, path in zip(lists, merged.paths, strict=True):
        assert merged.ids[path].tolist() == ids
        assert merged.positions[path].tolist() == list(range(len(ids)))
        last = path[-1]
        seen = places[(places <= last) & (last < merged.end[places])]
        assert seen.tolist() == path.tolist()


def test_the_ratio_counts_what_is_shared():
    rows = [row([*range(8), 100 + n, 200 + n]) for n in range(4)]
    assert token_ratio(rows) == 40 / 16
    assert token_ratio(rows[:1]) == 1.0


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 4), st.integers(50, 200), st.booleans())
def test_every_row_is_computed_once_on_equally_many_micro_batches(lengths, ranks, tokens, packed):
    rows = [row([7, 7, 7, *range(100, 100 + n)], str(i)) for i, n in enumerate(lengths)]
    shares = micro_batches(rows, ranks=ranks, tokens=tokens, layout="packed" if packed else "rows")
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) >= 1
    placed = [r.episode for share in shares for batch in share for r in batch.rows]
    assert sorted(placed) == sorted(r.episode for r in rows)
    for batch in (batch for share in shares for batch in share if batch.rows):
        assert batch.packed == packed
        sizes = [len(r.ids) for r in batch.rows]
        size = len(trie(batch.rows).ids) if packed else len(sizes) * max(sizes)
        assert size <= tokens


def test_ranks_are_balanced_and_none_is_idle():
    rows = [row(range(n)) for n in range(10, 50)]
    sizes = [sum(len(r.ids) for b in share for r in b.rows) for share in micro_batches(rows, ranks=2, tokens=10**6)]
    assert max(sizes) <= 1.35 * min(sizes)
    shares = micro_batches([row(range(20)) for _ in range(4)], ranks=4, tokens=10**6)
    assert [len(share[0].rows) for share in shares] == [1, 1, 1, 1]


def test_one_mask_does_not_span_tries_that_share_too_little():
    prompts = [[n] * 50 for n in range(4)]
    rows = [row([*prompt, *range(100 + k, 150 + k)]) for prompt in prompts for k in range(4)]
    flat = Costs(token=1.0, pair=0.0)
    steep = Costs(token=1.0, pair=1.0)
    visible = Costs(token=1.0, pair=1.0, dense=False)
    count = {
        name: len(micro_batches(rows, ranks=1, tokens=10**6, layout="packed", costs=costs)[0])
        for name, costs in (("flat", flat), ("steep", steep), ("visible", visible))
    }
    assert count == {"flat": 1, "steep": 16, "visible": 1}


def test_tries_are_taken_where_they_are_cheaper():
    forks = [row([*range(400), 1000 + n, *range(9)]) for n in range(8)]
    long_answers = [row([*range(100), *range(1000 * n, 1000 * n + 500)]) for n in range(1, 9)]
    costs = Costs(token=100.0, pair=1.0)

    def packed(rows):
        return micro_batches(rows, ranks=1, tokens=10**6, layout="auto", costs=costs)[0][0].packed

    assert packed(forks)
    assert not packed(long_answers)


def test_pairs_stay_together():
    rows = [row(range(5 + n), pair=f"p{n // 2}") for n in range(8)]
    for packed in (False, True):
        for share in micro_batches(rows, ranks=2, tokens=25, layout="packed" if packed else "rows"):
            for batch in share:
                names = [r.pair for r in batch.rows]
                assert all(names.count(name) == 2 for name in names)


def test_no_rows_is_one_empty_micro_batch_each():
    assert [[batch.rows for batch in share] for share in micro_batches([], ranks=2, tokens=10)] == [[()], [()]]

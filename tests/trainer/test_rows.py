from hypothesis import given
from hypothesis import strategies as st

from miles.trainer.rows import demonstration_row, tree_rows
from miles.types import Tree
from tests.trees import turn


def owned(row):
    return [token for token, own in zip(row.ids, row.owned, strict=True) if own]


def test_a_turn_shared_by_branches_is_owned_once_and_context_elsewhere():
    tree = Tree(
        turns=(
            turn(0, None, [1, 2, 3], [10, 11]),
            turn(1, 0, [20], [21]),
            turn(2, 0, [30], [31]),
        )
    )
    rows = tree_rows(tree)
    assert [row.ids for row in rows] == [[1, 2, 3, 10, 11, 20, 21], [1, 2, 3, 10, 11, 30, 31]]
    assert [owned(row) for row in rows] == [[10, 11, 21], [31]]
    assert sum(row.n_owned for row in rows) == 4


def test_what_must_not_be_trained_is_context():
    tree = Tree(turns=(turn(0, None, [1], [2, 3], trainable=False), turn(1, 0, [4], [5])))
    (row,) = tree_rows(tree)
    assert (row.ids, owned(row)) == ([1, 2, 3, 4, 5], [5])


def test_a_branch_that_owns_nothing_makes_no_row():
    assert tree_rows(Tree(turns=(turn(0, None, [1], [2], trainable=False),))) == []
    assert tree_rows(Tree()) == []


def test_a_token_without_logprob_is_not_trained():
    from dataclasses import replace

    one = replace(turn(0, None, [1], [2, 3]), logprobs=(None, -0.25))
    (row,) = tree_rows(Tree(turns=(one,)))
    assert (owned(row), row.logprobs) == ([3], [0.0, 0.0, -0.25])


def test_nothing_after_the_last_owned_token_is_computed():
    tree = Tree(turns=(turn(0, None, [1], [2]), turn(1, 0, [3] * 50, [4], trainable=False)))
    (row,) = tree_rows(tree)
    assert row.ids == [1, 2]


def test_a_demonstration_has_no_behaviour_policy():
    row = demonstration_row([1, 2, 3], [False, True, True])
    assert (row.n_owned, row.logprobs) == (2, [0.0, 0.0, 0.0])


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=30))
def test_in_any_tree_every_sampled_token_is_owned_exactly_once(parents):
    turns = []
    for index, parent in enumerate(parents):
        at = None if parent < 0 or index == 0 else min(parent, index - 1)
        turns.append(turn(index, at, [1000 + index], [2 * index, 2 * index + 1]))
    rows = tree_rows(Tree(turns=tuple(turns)))
    assert sorted(token for row in rows for token in owned(row)) == list(range(2 * len(parents)))

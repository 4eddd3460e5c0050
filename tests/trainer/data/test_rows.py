from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.trainer.data.rows import Row, demonstration_row, tree_rows
from miles.types import Routing, Tree
from tests.trees import turn


def owned(row):
    return row.ids[row.owned].tolist()


def test_a_turn_shared_by_branches_is_owned_once_and_context_elsewhere():
    tree = Tree(
        turns=(
            turn(0, None, [1, 2, 3], [10, 11]),
            turn(1, 0, [20], [21]),
            turn(2, 0, [30], [31]),
            turn(3, 0, [40], []),
        )
    )
    rows = tree_rows(tree)
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 10, 11, 20, 21], [1, 2, 3, 10, 11, 30, 31]]
    assert [owned(row) for row in rows] == [[10, 11, 21], [31]]
    assert sum(row.n_owned for row in rows) == 4


def test_what_must_not_be_trained_is_context():
    tree = Tree(turns=(turn(0, None, [1], [2, 3], trainable=False), turn(1, 0, [4], [5])))
    (row,) = tree_rows(tree)
    assert (row.ids.tolist(), owned(row)) == ([1, 2, 3, 4, 5], [5])


def test_a_branch_that_owns_nothing_makes_no_row():
    assert tree_rows(Tree(turns=(turn(0, None, [1], [2], trainable=False),))) == []
    assert tree_rows(Tree()) == []


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_token_without_logprob_is_not_trained(missing):
    one = replace(turn(0, None, [1], [2, 3]), logprobs=(missing, -0.25))
    (row,) = tree_rows(Tree(turns=(one,)))
    assert (owned(row), row.logprobs.tolist()) == ([3], [-0.25])


def test_a_first_token_without_anything_before_it_is_not_trained():
    (row,) = tree_rows(Tree(turns=(turn(0, None, [], [2, 3]),)))
    assert owned(row) == [3]


def test_nothing_after_the_last_owned_token_is_computed():
    tree = Tree(turns=(turn(0, None, [1], [2]), turn(1, 0, [3] * 50, [4], trainable=False)))
    (row,) = tree_rows(tree)
    assert row.ids.tolist() == [1, 2]


def test_credit_of_a_turn_stands_at_its_tokens():
    tree = Tree(turns=(turn(0, None, [1], [2, 3]), turn(1, 0, [4], [5])))
    (row,) = tree_rows(tree, credit={1: 0.5})
    assert row.tracks["credit"].tolist() == [0.0, 0.0, 0.5]


def test_recorded_routing_begins_with_the_token_before_the_turn():
    routing = Routing(tokens=1, layers=1, top_k=1, width=1, data="")
    first = replace(turn(0, None, [1, 2], [3, 4]), routing=routing)
    second = replace(turn(1, 0, [5], [6]), routing=routing)
    (row,) = tree_rows(Tree(turns=(first, second)))
    assert [start for start, _ in row.routing] == [0, 3]


def test_a_demonstration_has_no_behaviour_policy():
    row = demonstration_row([1, 2, 3], [False, True, True])
    assert (row.n_owned, row.logprobs.tolist()) == (2, [0.0, 0.0])


def test_a_row_whose_lists_do_not_fit_together_is_refused():
    with pytest.raises(ValueError, match=r"tracks of other lengths: {'logprobs': 2}"):
        Row(ids=[1, 2], owned=[False, True], logprobs=[0.0, 0.0], versions=[0])
    with pytest.raises(ValueError, match="the first one false"):
        Row(ids=[1, 2], owned=[True, True], logprobs=[0.0, 0.0], versions=[0, 0])


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=30))
def test_in_any_tree_every_sampled_token_is_owned_exactly_once(parents):
    turns = []
    for index, parent in enumerate(parents):
        at = None if parent < 0 or index == 0 else min(parent, index - 1)
        turns.append(turn(index, at, [1000 + index], [2 * index, 2 * index + 1]))
    rows = tree_rows(Tree(turns=tuple(turns)))
    assert sorted(np.concatenate([row.ids[row.owned] for row in rows]).tolist()) == list(range(2 * len(parents)))

from miles.types import Discarded, Episode, Faulted, Scored, Tree, from_json, to_json
from tests.trees import episode, turn


def test_an_episode_survives_json_with_every_kind_of_outcome():
    for outcome in (Scored(reward=0.5, parts={"a": 1.0}), Faulted(reason="crash"), Discarded(reason="sandbox")):
        one = episode(outcome)
        assert from_json(Episode, to_json(one)) == one


def test_only_a_discarded_episode_has_no_reward():
    assert episode(Scored(reward=0.25)).reward == 0.25
    assert episode(Faulted(reason="crash")).reward == 0.0
    assert episode(Discarded(reason="sandbox")).reward is None


def test_a_lone_surrogate_does_not_break_json():
    one = episode(Faulted(reason="x", detail="bad \ud83d text"))
    assert from_json(Episode, to_json(one)).outcome == Faulted(reason="x", detail="bad ? text")


def test_paths_and_leaves_of_a_tree():
    tree = Tree(turns=(turn(0, None, [1], [2]), turn(1, 0, [3], [4]), turn(2, 0, [5], [6], version=7)))
    assert [t.id for t in tree.path(2)] == [0, 2]
    assert [t.id for t in tree.leaves()] == [1, 2]
    assert tree.sampled_tokens == 3
    assert tree.oldest_version == 0
    assert Tree().oldest_version is None

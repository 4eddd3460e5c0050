from dataclasses import replace

import pytest

from miles.errors import ConfigError
from miles.trainer.data.rows import tree_rows
from miles.trajectories import Trajectory, open_trajectories
from miles.types import Edge, Faulted, Tree
from tests.trees import episode, turn

TREE = Tree(
    turns=(
        turn(0, None, [1, 2], [3, 4], version=5),
        turn(1, 0, [5], [6, 7]),
        turn(2, 0, [8], [9], trainable=False),
    )
)


def test_a_line_brings_back_the_tree(tmp_path):
    lines = [
        Trajectory.of_episode(episode(1.0, tree=TREE)),
        Trajectory.of_episode(episode(Faulted(reason="agent_timeout"), tree=TREE)),
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(line.to_line() for line in lines) + "\n\n")
    with open_trajectories(path) as read:
        assert list(read) == lines
    assert lines[0].meta == {"task": "t", "group": "g", "split": "train", "outcome": "scored"}
    assert (lines[1].reward, lines[1].meta["reason"]) == (0.0, "agent_timeout")


def test_paths_are_the_trainers_rows_before_ownership():
    paths = list(Trajectory(id="x", tree=TREE).paths())
    assert [ids for ids, _, _ in paths] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 9]]
    assert [mask for _, mask, _ in paths] == [[False] * 2 + [True] * 2 + [False] + [True] * 2, [False] * 6]
    assert paths[0][2] == [None, None, -0.5, -0.5, None, -0.5, -0.5]
    assert [row.ids.tolist() for row in tree_rows(TREE)] == [[1, 2, 3, 4, 5, 6, 7]]


def test_a_token_without_a_logprob_is_not_to_be_trained():
    blind = replace(turn(0, None, [1], [2, 3]), logprobs=(None, -0.5))
    ((_, mask, logprobs),) = Trajectory(id="x", tree=Tree(turns=(blind,))).paths()
    assert (mask, logprobs) == ([False, False, True], [None, None, -0.5])


def test_the_outline_shows_branches_indented_and_goes_on_below():
    shown = Trajectory(id="x", tree=TREE).outline().splitlines()
    assert shown[0] == "0 root: 2 new prompt tokens, 2 trained: ''"
    assert len(shown) == 3


def test_a_long_line_of_turns_can_be_outlined():
    turns = (turn(0, None, [1], [2]), *(turn(n, n - 1, [1], [2]) for n in range(1, 3000)))
    shown = Trajectory(id="x", tree=Tree(turns=turns)).outline().splitlines()
    assert (len(shown), shown[-1].startswith("2999 extend")) == (3000, True)
    assert turns[1].edge is Edge.EXTEND


@pytest.mark.parametrize(
    "line", ["{}", "[1]", "nonsense", '{"format": "other"}', '{"format": "miles-trajectory-1", "turns": [{}]}']
)
def test_anything_else_is_named_by_its_line(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text(Trajectory(id="x", tree=TREE).to_line() + "\n" + line + "\n")
    with open_trajectories(path) as read:
        next(read)
        with pytest.raises(ConfigError, match=r"t\.jsonl:2: "):
            next(read)

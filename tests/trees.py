"""Trees, episodes and groups in one line each, for tests."""

from miles.types import Edge, Episode, Finish, Group, Outcome, Scored, Tree, Turn


def turn(
    id: int, parent: int | None, prompt: list[int], output: list[int], *, version: int = 0, trainable: bool = True
) -> Turn:
    return Turn(
        id=id,
        parent=parent,
        edge=Edge.ROOT if parent is None else Edge.EXTEND,
        messages=(),
        message={"role": "assistant", "content": ""},
        prompt_ids=tuple(prompt),
        output_ids=tuple(output),
        logprobs=tuple(-0.5 for _ in output),
        versions=tuple(version for _ in output),
        finish=Finish.STOP,
        trainable=trainable,
    )


def episode(outcome: Outcome | float, *, tree: Tree | None = None, group: str = "g", index: int = 0) -> Episode:
    return Episode(
        id=f"{group}/{index}",
        task_id="t",
        group_id=group,
        index=index,
        attempt=0,
        split="train",
        tree=tree if tree is not None else Tree(turns=(turn(0, None, [1, 2], [3, 4]),)),
        outcome=Scored(reward=outcome) if isinstance(outcome, float) else outcome,
    )


def group(*outcomes: Outcome | float, id: str = "g", tree: Tree | None = None) -> Group:
    members = tuple(episode(o, tree=tree, group=id, index=i) for i, o in enumerate(outcomes))
    return Group(id=id, seq=0, task_id="t", episodes=members)

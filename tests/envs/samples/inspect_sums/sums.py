"""inspect-ai: a task that is answered at once, one with a tool, one whose scorer breaks."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Target, accuracy, match, scorer
from inspect_ai.solver import TaskState, generate, prompt_template, use_tools
from inspect_ai.tool import tool


@tool
def adding():
    async def execute(one: int, two: int) -> str:
        """Add two numbers.

        Args:
            one: the first
            two: the second
        """
        return str(one + two)

    return execute


def _samples():
    return MemoryDataset([Sample(id=f"s{n}", input=f"What is {n} + 7?", target=str(n + 7)) for n in range(6)])


@scorer(metrics=[accuracy()])
def breaking():
    async def score(state: TaskState, target: Target) -> Score:
        raise ValueError("the scorer broke")

    return score


@task
def plain():
    return Task(
        dataset=_samples(),
        solver=[prompt_template("{prompt}\nEnd with 'ANSWER: n'."), generate()],
        scorer=match(numeric=True),
    )


@task
def tooled():
    return Task(dataset=_samples(), solver=[use_tools(adding()), generate()], scorer=match(numeric=True))


@task
def broken():
    return Task(dataset=_samples(), solver=generate(), scorer=breaking())

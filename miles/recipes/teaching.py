"""Demonstrations out of solutions: so that a small model can begin in any environment that knows what solves its tasks.

Half of them are wrong on purpose (another task's answer, or random actions): a warm start teaches the form, and leaves
something to reinforcement learning.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle

from miles.envs.base import Demonstration, Solution, Taskset
from miles.envs.selection import SelectedTaskset, SelectionConfig
from miles.errors import EnvError, MilesError, raised
from miles.types import Env, Message, Task

__all__ = ["TaughtTaskset", "taught"]

_TASKS, _WORDS, _OFTEN = 256, 400, 5


class TaughtTaskset(SelectedTaskset):
    """A taskset with demonstrations, and the words that they use often."""

    def __init__(self, inner: Taskset, shown: Sequence[Demonstration]) -> None:
        super().__init__(inner, SelectionConfig(), None)
        self._shown = list(shown)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        order = list(self._shown)
        random.Random(seed).shuffle(order)
        return cycle(order)

    def vocabulary(self) -> Sequence[str]:
        counts: Counter[str] = Counter()
        for messages, _ in self._shown:
            for message in messages:
                counts.update(re.findall(r"\S{2,40} ?", str(message.get("content") or "")))
        return [word for word, count in counts.most_common(_WORDS) if count >= _OFTEN]


async def taught(taskset: Taskset, seed: int = 0) -> Taskset:
    """The taskset itself where it has demonstrations, or where nobody knows a solution; else one with some of ours."""
    if next(taskset.demonstrations(seed), None) is not None:
        return taskset
    dice, shown = random.Random(seed), []
    tasks = list(taskset.tasks("train")[:_TASKS])
    solutions = [(task, await taskset.solution(task)) for task in tasks[:1]]
    if not solutions or solutions[0][1] is None:
        return taskset
    solutions += [(task, await taskset.solution(task)) for task in tasks[1:]]
    known = [(task, solution) for task, solution in solutions if solution is not None and not solution.commands]
    for number, (task, solution) in enumerate(known):
        if number % 2 and solution.actions:
            drawn = await taskset.random_actions(task, len(solution.actions))
            solution = Solution(actions=tuple(drawn), answer=solution.answer)
        elif number % 2:
            solution = dice.choice(known)[1]
        try:
            shown.append(await _shown(taskset, task, solution))
        except Exception as error:  # the boundary to an environment's code
            raise EnvError(
                f"environment {taskset.name!r}: the solution of task {task.id!r} cannot be shown: {raised(error)}; see "
                "miles env test"
            ) from error
    return TaughtTaskset(taskset, shown) if shown else taskset


async def _shown(taskset: Taskset, task: Task, solution: Solution) -> Demonstration:
    """The conversation of an agent that plays a solution."""
    env = taskset.env(task, None)
    try:
        observation = await env.reset()
        messages = [*observation.messages]
        for number, action in enumerate(solution.actions):
            told, over = await _acted(env, action, f"call_{number}")
            messages += told
            if over:
                break
        if solution.answer or not solution.actions:
            messages.append({"role": "assistant", "content": solution.answer})
        elif messages[-1]["role"] == "tool":
            messages.pop()  # a demonstration ends with what the agent does
        return tuple(messages), observation.tools
    finally:
        await env.close()


async def _acted(env: Env, action: str, name: str) -> tuple[list[Message], bool]:
    try:
        told = json.loads(action)
        function = {"name": told["name"], "arguments": json.dumps(told["arguments"])}
    except (ValueError, TypeError, KeyError):
        function = {"name": "act", "arguments": json.dumps({"action": action})}
    try:
        step = await env.step(action)
        text, over = step.observation, step.terminated or step.truncated
    except MilesError as error:
        text, over = str(error), True
    call = {"id": name, "type": "function", "function": function}
    said: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": text},
    ]
    return said, over

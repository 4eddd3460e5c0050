"""What an environment is: a taskset that makes one Env per episode."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from miles.sandboxes.base import Sandbox, SandboxSpec
from miles.types import Env, Message, Observation, Score, Step, Task, ToolSpec, Transcript

__all__ = ["ACT_TOOL", "BaseEnv", "Demonstration", "Solution", "Taskset"]

Demonstration = tuple[tuple[Message, ...], tuple[ToolSpec, ...]]
"""A finished conversation to imitate, and the tools it was offered."""

ACT_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "act",
        "description": "Take one action in the environment and see what it answers.",
        "parameters": {
            "type": "object",
            "properties": {"action": {"type": "string"}},
            "required": ["action"],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What solves a task, in this order: files and commands in its sandbox, actions, a last text of the agent's."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    answer: str = ""


class Taskset:
    """Tasks by split, and the machine and the Env that each of them needs. Subclass and override."""

    name = "taskset"
    on_agent_failure: Literal["fault", "score"] = "fault"
    """What an agent's own crash, timeout or overflow means: reward 0, or the score as it stands."""

    harness = "react"
    """The harness of recipes that name none; "own" where the environment brings its agent."""
    reward_range: tuple[float, float] | None = None
    """The least and the most that an episode can score, where that is known."""
    generation = ""
    """The generation layer where one harness is not enough, as module:attr (games of several players)."""
    concurrency: int | None = None
    """Episodes at a time, where the environment cannot hold more."""

    def splits(self) -> Sequence[str]:
        """Names that `tasks` takes."""
        return ("train", "test")

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of "train" or "test", in a fixed order, ids unique."""
        raise NotImplementedError(f"{type(self).__name__}.tasks(split) must return the tasks")

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        """A new Env for one episode of `task`."""
        raise NotImplementedError(f"{type(self).__name__}.env(task, sandbox) must return an Env")

    def sandbox(self, task: Task) -> SandboxSpec | None:
        """The machine that an episode of `task` needs; None for none."""
        return None

    def seconds(self, task: Task) -> Mapping[str, float]:
        """A task's own deadlines for the phases "agent" and "score"; the recipe's for those that are not there."""
        return {}

    def vocabulary(self) -> Sequence[str]:
        """Words that a tokenizer made for this taskset should know whole."""
        return ()

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Endless conversations for a supervised warm start; nothing by default."""
        return iter(())

    async def random_actions(self, task: Task, count: int) -> list[str]:
        """Actions of the task's space, the same every time; empty where it has none that can be drawn."""
        return []

    async def solution(self, task: Task) -> Solution | None:
        """What scores the most; None where nobody knows. `miles env test` plays it."""
        return None

    async def close(self) -> None:
        """End what the taskset started."""


class BaseEnv:
    """An Env whose task is only a prompt: override what is not trivial."""

    def __init__(self, task: Task) -> None:
        self.task = task

    async def reset(self) -> Observation:
        return Observation(messages=self.task.prompt)

    async def step(self, action: str) -> Step:
        return Step(observation="this environment takes no actions", terminated=True)

    async def score(self, transcript: Transcript) -> Score:
        raise NotImplementedError(f"{type(self).__name__}.score(transcript) must return a Score")

    async def close(self) -> None:
        return None

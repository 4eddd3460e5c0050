"""What an environment is: a taskset that makes one Env per episode."""

from collections.abc import Iterator, Sequence
from typing import Literal

from miles.sandboxes.base import Sandbox, SandboxSpec
from miles.types import Env, Message, Observation, Score, Step, Task, ToolSpec, Transcript

__all__ = ["ACT_TOOL", "BaseEnv", "Demonstration", "Taskset"]

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


class Taskset:
    """Tasks by split, and the machine and the Env that each of them needs. Subclass and override."""

    name = "taskset"
    on_agent_failure: Literal["fault", "score"] = "fault"
    """What an agent's own crash, timeout or overflow means: reward 0, or the score as it stands."""

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of "train" or "test", in a fixed order, ids unique."""
        raise NotImplementedError(f"{type(self).__name__}.tasks(split) must return the tasks")

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        """A new Env for one episode of `task`."""
        raise NotImplementedError(f"{type(self).__name__}.env(task, sandbox) must return an Env")

    def sandbox(self, task: Task) -> SandboxSpec | None:
        """The machine that an episode of `task` needs; None for none."""
        return None

    def vocabulary(self) -> Sequence[str]:
        """Words that a tokenizer made for this taskset should know whole."""
        return ()

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Endless conversations for a supervised warm start; nothing by default."""
        return iter(())


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

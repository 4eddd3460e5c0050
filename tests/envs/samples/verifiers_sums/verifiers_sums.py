"""A package of verifiers 0.4: sums, with a tool on wish, two weighted rewards and a metric."""

from collections.abc import Iterable
from typing import Literal

import verifiers.v1 as vf


class SumData(vf.TaskData):
    one: int
    two: int
    answer: str


class Adding(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, one: int, two: int) -> int:
        """Add two numbers."""
        return one + two


class SumTaskConfig(vf.TaskConfig):
    broken: bool = False
    tools: bool = False
    toolset: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adding(config.toolset)] if config.tools else []

    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        if self.config.broken:
            raise ValueError("the reward function broke")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return float(0 < len(trace.last_reply) < 10)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class SumConfig(vf.TasksetConfig):
    split: Literal["train", "eval"] = "train"
    task: SumTaskConfig = SumTaskConfig()


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterable[SumTask]:
        offset = 0 if self.config.split == "train" else 100
        for n in range(6):
            data = SumData(
                id=f"{self.config.split}-{n}",
                one=n + offset,
                two=7,
                answer=str(n + offset + 7),
                prompt=f"What is {n + offset} plus 7?",
                system_prompt="Answer with one number.",
            )
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]

"""A toy with steps: guess a number from higher/lower answers. Small enough for every contract test."""

import random
from collections.abc import Sequence

from pydantic import Field

from miles.config import Config
from miles.envs.base import ACT_TOOL, BaseEnv, Solution, Taskset
from miles.sandboxes.base import Sandbox
from miles.types import Env, Observation, Score, Step, Task, Transcript

__all__ = ["GuessNumber", "GuessNumberConfig", "GuessNumberTaskset"]


class GuessNumber(BaseEnv):
    """`act("42")` answers higher, lower or right; the sooner, the better: reward 1, 1/2, 1/3, …"""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.guesses = 0
        self.reward = 0.0

    async def reset(self) -> Observation:
        self.guesses, self.reward = 0, 0.0
        return Observation(messages=self.task.prompt, tools=(ACT_TOOL,))

    async def step(self, action: str) -> Step:
        self.guesses += 1
        truncated = self.guesses >= self.task.data["guesses"]
        try:
            guess = int(action.strip())
        except ValueError:
            return Step(observation="not a number", truncated=truncated)
        secret = self.task.data["secret"]
        if guess == secret:
            self.reward = 1.0 / self.guesses
            return Step(observation="right", reward=self.reward, terminated=True)
        return Step(observation="higher" if guess < secret else "lower", truncated=truncated)

    async def score(self, transcript: Transcript) -> Score:
        return Score(reward=self.reward, parts={"guesses": float(self.guesses)})


class GuessNumberConfig(Config):
    """Sizes of the toy."""

    highest: int = Field(100, gt=0)
    """Numbers go from 1 to this."""
    count: int = Field(256, gt=0)
    """Tasks of each split."""


class GuessNumberTaskset(Taskset):
    """Numbers from 1 to `highest`, seven guesses."""

    name = "guess-number"
    config_class = GuessNumberConfig
    reward_range = (0.0, 1.0)

    def __init__(self, config: GuessNumberConfig | None = None) -> None:
        config = config or GuessNumberConfig()
        self.highest, self.count = config.highest, config.count

    def tasks(self, split: str) -> Sequence[Task]:
        return [self.task(split, seed) for seed in range(self.count)]

    def task(self, split: str, seed: int) -> Task:
        """The task of one seed."""
        secret = random.Random(f"{split}/{seed}").randint(1, self.highest)
        prompt = {
            "role": "user",
            "content": f"Guess my number between 1 and {self.highest} with the act tool.",
        }
        return Task(id=f"{split}/{seed}", prompt=(prompt,), data={"secret": secret, "guesses": 7}, split=split)

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        return GuessNumber(task)

    async def random_actions(self, task: Task, count: int) -> list[str]:
        dice = random.Random(task.id)
        return [str(dice.randint(1, self.highest)) for _ in range(count)]

    async def solution(self, task: Task) -> Solution:
        return Solution(actions=(str(task.data["secret"]),))

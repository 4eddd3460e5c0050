"""`miles env test` finds every environment that breaks the contract."""

import itertools
import random

import pytest

from miles.envs.base import ACT_TOOL, BaseEnv, Solution, Taskset
from miles.envs.toy import GuessNumberTaskset
from miles.envs.vault import VaultTaskset
from miles.recipes.envcheck import CHECKS, check_env
from miles.sandboxes.base import SandboxSpec
from miles.types import Observation, Score, Step, Task


class Env(BaseEnv):
    async def reset(self):
        return Observation(messages=self.task.prompt, tools=(ACT_TOOL,))

    async def step(self, action):
        return Step(observation=f"you said {action}")

    async def score(self, transcript):
        return Score(reward=float(transcript.final_text == "42"))


class Tasks(Taskset):
    name, reward_range, made = "tasks", (0.0, 1.0), Env

    def tasks(self, split):
        return [Task(id=f"{split}/{n}", prompt=({"role": "user", "content": "?"},), split=split) for n in range(2)]

    def env(self, task, sandbox):
        return self.made(task)

    async def solution(self, task):
        return Solution(answer="42")

    async def random_actions(self, task, count):
        return ["left"] * count


async def failed(taskset):
    report = await check_env(taskset, tasks=2, tell=lambda *found: None)
    assert [found["check"] for found in report] == list(CHECKS)
    return {found["check"]: found["detail"] for found in report if found["status"] == "FAILED"}


@pytest.mark.parametrize("taskset", [Tasks, GuessNumberTaskset, VaultTaskset])
async def test_honest_environments_pass(taskset):
    assert await failed(taskset()) == {}


async def test_tasks_of_the_same_id_and_empty_splits_are_found():
    class Same(Tasks):
        def tasks(self, split):
            return [Task(id="one", prompt=({"role": "user", "content": "?"},))] * 2

    assert "same id" in (await failed(Same()))["tasks by split, ids unique"]


async def test_tasks_that_are_in_both_splits_are_found():
    class Both(Tasks):
        def tasks(self, split):
            return [Task(id=f"{n}", prompt=({"role": "user", "content": "?"},)) for n in range(3)]

    assert "3 tasks are in both splits" in (await failed(Both()))["tasks by split, ids unique"]


async def test_a_reset_that_shows_nothing_is_found():
    class Blank(Env):
        async def reset(self):
            return Observation(messages=())

    class Mute(Tasks):
        made = Blank

        def tasks(self, split):
            return [Task(id=split, prompt=(), split=split)]

    assert "sees nothing" in (await failed(Mute()))["reset shows something"]


async def test_an_environment_that_plays_otherwise_the_second_time_is_found():
    class Moody(Env):
        async def step(self, action):
            return Step(observation=str(random.random()))

    class Tasks2(Tasks):
        made = Moody

    assert (
        "differs when it is played twice: after 1 actions" in (await failed(Tasks2()))["the same task plays the same"]
    )


async def test_observations_out_of_their_space_and_steps_that_raise_on_nonsense_are_found():
    class Liar(Env):
        async def step(self, action):
            return Step(observation="x", info={"outside_space": True})

    class Strict(Env):
        async def step(self, action):
            return Step(observation={"left": "ok"}[action])

    class Liars(Tasks):
        made = Liar

    class Stricts(Tasks):
        made = Strict

    assert "not in its space" in (await failed(Liars()))["spaces are honest"]
    assert "KeyError" in (await failed(Stricts()))["spaces are honest"]


async def test_rewards_for_nothing_and_solutions_that_score_too_little_are_found():
    class Generous(Env):
        async def score(self, transcript):
            return Score(reward=0.5)

    class Gifts(Tasks):
        made = Generous

    found = await failed(Gifts())
    assert "gives 0.5 for nothing at all" in found["nothing scores the least"]
    assert "the solution scores 0.5, nothing scores 0.5" in found["a solution scores the most"]


async def test_a_score_that_changes_is_found():
    numbers = itertools.count()

    class Noisy(Env):
        async def score(self, transcript):
            return Score(reward=float(next(numbers)))

    class Noise(Tasks):
        made, reward_range = Noisy, None

    assert "scores" in (await failed(Noise()))["scoring is stable"]


async def test_an_environment_that_believes_the_agents_own_reward_file_is_found():
    class Trusting(Env):
        def __init__(self, task, sandbox):
            super().__init__(task)
            self.sandbox = sandbox

        async def score(self, transcript):
            found = await self.sandbox.exec("cat /logs/verifier/reward.txt")
            return Score(reward=1.0 if transcript.final_text == "42" or found.stdout.startswith(b"1") else 0.0)

    class Trust(Tasks):
        def env(self, task, sandbox):
            return Trusting(task, sandbox)

        def sandbox(self, task):
            return SandboxSpec()

    assert "a reward file of the agent's own gives 1" in (await failed(Trust()))["an early reward file gains nothing"]

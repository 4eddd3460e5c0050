from decimal import Decimal

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from miles.envs.gymnasium import GymnasiumConfig, GymnasiumTaskset, as_float, register
from miles.errors import EnvError
from miles.types import Transcript

NOTHING = Transcript(messages=(), final_text="", turns=0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_our_toy_is_a_gymnasium_environment_by_gymnasiums_own_check():
    register()
    env = gymnasium.make("miles/guess-number-v0")
    check_env(env.unwrapped, skip_render_check=True)
    first, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    assert first == again
    observation, reward, terminated, truncated, _ = env.step("5")
    assert (observation in ("higher", "lower", "right"), reward, terminated, truncated) == (True, 0.0, False, False)


LAKE = GymnasiumConfig(id="FrozenLake-v1", kwargs={"is_slippery": False}, count=4)


async def test_any_gymnasium_environment_is_a_taskset_played_by_text():
    taskset = GymnasiumTaskset(LAKE)
    assert [task.data["seed"] for task in taskset.tasks("test")] == [4, 5, 6, 7]
    env = taskset.env(taskset.tasks("train")[0], None)
    observation = await env.reset()
    assert "Discrete(4)" in observation.messages[0]["content"]
    assert observation.tools[0]["function"]["name"] == "act"
    for action in ["1", "1", "2", "2", "1", "2"]:
        step = await env.step(action)
    assert (step.terminated, step.reward) == (True, 1.0)
    assert (await env.step("0")).observation == "the episode is over"
    assert (await env.score(NOTHING)).reward == 1.0
    await env.close()


@pytest.mark.parametrize("action", ["9", "left", "", "1.5"])
async def test_an_action_that_is_none_is_told_and_costs_nothing(action):
    taskset = GymnasiumTaskset(LAKE)
    env = taskset.env(taskset.tasks("train")[0], None)
    await env.reset()
    assert (await env.step(action)).observation.startswith("invalid action")
    await env.close()


@pytest.mark.parametrize("reward", [np.array([1.0]), np.float32(1), np.array(1.0), True, Decimal("1"), 1])
def test_rewards_of_every_kind_become_one_float(reward):
    value = as_float(reward)
    assert (type(value), value) == (float, 1.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), np.array([1.0, 2.0]), None, "high"])
def test_rewards_that_are_no_finite_number_are_the_environments_error(reward):
    with pytest.raises(EnvError, match="as reward; it must be"):
        as_float(reward)

import json
import subprocess
import sys
from decimal import Decimal

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from miles.envs.gym import HubEnv
from miles.envs.gymnasium import GymnasiumConfig, GymnasiumTaskset
from miles.envs.rewards import as_float
from miles.envs.toy import GuessNumberTaskset
from miles.envs.vault import VaultTaskset
from miles.envs.workers.inprocess import adapter_module
from miles.errors import EnvError
from miles.types import Transcript

NOTHING = Transcript(messages=(), final_text="", turns=0)
LAKE = GymnasiumConfig(id="FrozenLake-v1", kwargs={"is_slippery": False}, count=4)


async def played(config, *actions):
    taskset = GymnasiumTaskset(config)
    env = taskset.env(taskset.tasks("train")[0], None)
    observation = await env.reset()
    steps = [await env.step(action) for action in actions]
    score = await env.score(NOTHING)
    await env.close()
    return observation.messages[0]["content"], steps, score


async def test_any_gymnasium_environment_is_a_taskset_played_by_text():
    taskset = GymnasiumTaskset(LAKE)
    assert [task.data["seed"] for task in taskset.tasks("test")] == [4, 5, 6, 7]
    text, steps, score = await played(LAKE, "1", "down", " RIGHT ", "2", "1", "2", "0")
    assert "0 (left), 1 (down), 2 (right), 3 (up)" in text
    assert (steps[5].terminated, steps[5].reward, steps[6].observation) == (True, 1.0, "the episode is over")
    assert (score.reward, score.parts) == (1.0, {"steps": 6.0, "invalid": 0.0})


async def test_taxi_is_drawn_without_colours_and_tells_what_is_possible():
    text, steps, _ = await played(GymnasiumConfig(id="Taxi-v4", count=1), "0")
    assert "+---------+" in text
    assert "\x1b" not in text + steps[0].observation
    assert "Possible now: " in text
    assert steps[0].reward == -1.0


async def test_a_mask_may_be_enforced_and_invalid_actions_may_cost():
    settings = {"enforce_mask": True, "invalid_reward": -0.5}
    _, steps, score = await played(GymnasiumConfig(id="Taxi-v4", count=1, **settings), "5", "6", "nonsense")
    assert [step.observation.partition(":")[0] for step in steps] == ["invalid action"] * 3
    assert "5 is not possible now" in steps[0].observation
    assert score.reward == -1.5


async def test_blackjack_shows_its_tuple():
    text, steps, _ = await played(GymnasiumConfig(id="Blackjack-v1", count=1), "stick")
    assert "Observation: (" in text
    assert steps[0].terminated


@pytest.mark.parametrize("action", ["9", "-1", "left!", "", "1.5", "true", "[1]", "1" * 5000])
async def test_an_action_that_is_none_is_told_and_costs_nothing(action):
    _, steps, score = await played(LAKE, action)
    assert steps[0].observation.startswith("invalid action")
    assert score.parts == {"steps": 0.0, "invalid": 1.0}


SPACES = gymnasium.spaces
EVERY_SPACE = [
    SPACES.Discrete(5, start=2),
    SPACES.MultiDiscrete([3, 2]),
    SPACES.MultiBinary(3),
    SPACES.Box(-1.0, 1.0, (2, 2), np.float32),
    SPACES.Text(5),
    SPACES.Tuple((SPACES.Discrete(2), SPACES.Box(0, 1, (1,), np.float64))),
    SPACES.Dict({"go": SPACES.Discrete(3), "say": SPACES.Text(4)}),
]


@pytest.mark.parametrize("space", EVERY_SPACE, ids=lambda space: type(space).__name__)
def test_every_space_is_told_in_words_and_read_back_from_text(space):
    gym = adapter_module("gym")
    space.seed(1)
    assert gym.describe(space)
    for _ in range(20):
        action = space.sample()
        read = gym.parse(space, gym.as_text(space, action))
        assert space.contains(read)
        assert gym.as_text(space, read) == gym.as_text(space, action)
    if not isinstance(space, SPACES.Text):
        for wrong in ("", "{}", "[[]]", '{"go": 9, "say": 1}', "null"):
            with pytest.raises(ValueError, match="is not"):
                gym.parse(space, wrong)


async def test_what_an_environment_shows_outside_of_its_space_is_told():
    class Liar(gymnasium.Env):
        action_space, observation_space, render_mode = SPACES.Discrete(2), SPACES.Discrete(2), None

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return 7, np.array([1.0]), False, True, {}

    taskset = GymnasiumTaskset(GymnasiumConfig(id="Liar-v0", count=1), make=Liar)
    env = taskset.env(taskset.tasks("train")[0], None)
    await env.reset()
    step = await env.step("1")
    assert (step.info, step.reward, step.terminated, step.truncated) == ({"outside_space": True}, 1.0, False, True)


@pytest.mark.parametrize("reward", [np.array([1.0]), np.float32(1), np.array(1.0), True, Decimal("1"), 1, [1.0], [[1]]])
def test_rewards_of_every_kind_become_one_float(reward):
    value = as_float(reward)
    assert (type(value), value) == (float, 1.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), np.array([1.0, 2.0]), [1.0, 2.0], [], None, "high"])
def test_rewards_that_are_no_finite_number_are_the_environments_error(reward):
    with pytest.raises(EnvError, match="as reward; it must be"):
        as_float(reward)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["guess-number", "vault"])
def test_every_environment_is_a_gymnasium_environment_by_gymnasiums_own_check(name):
    env = gymnasium.make(f"miles/{name}-v0")
    check_env(env.unwrapped, skip_render_check=True)
    assert env.reset(seed=3)[0] == env.reset(seed=3)[0]
    env.close()


def test_gymnasium_imports_what_registers_them_by_the_name_before_the_colon(tmp_path):
    code = "import gymnasium; print(gymnasium.make('miles.envs.gym:miles/guess-number-v0').reset(seed=1)[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith("Guess my number between 1 and 100")


def test_the_rewards_of_an_episode_add_up_to_its_score():
    env = HubEnv(taskset=GuessNumberTaskset())
    _, info = env.reset(options={"task": "train/30"})
    assert json.loads(info["tools"])[0]["function"]["name"] == "act"
    total, over = 0.0, False
    for action in ("50", "30", '{"name": "act", "arguments": {"action": "36"}}'):
        _, reward, over, _, info = env.step(action)
        total += reward
    assert (over, total, info["score"]) == (True, 1 / 3, 1 / 3)
    with pytest.raises(EnvError, match="call reset before step"):
        env.step("1")
    env.close()


def test_a_sandbox_is_played_by_shell_calls_and_the_last_word_ends_it():
    taskset = VaultTaskset()
    task = taskset.tasks("train")[0]
    env = HubEnv(taskset=taskset)
    text, _ = env.reset(options={"task": task.id})
    name = text.split()[1]
    call = {"name": "shell", "arguments": {"command": f"cat {name}"}}
    assert env.step(json.dumps(call))[0] == task.data["files"][name]
    assert env.step(f"answer {task.data['key']}")[1:3] == (1.0, True)
    env.close()


def test_several_at_once_are_gymnasiums_own_vectors():
    envs = gymnasium.make_vec("miles/guess-number-v0", num_envs=2, vectorization_mode="sync")
    observations, _ = envs.reset(seed=1)
    assert len(observations) == 2
    _, rewards, *_ = envs.step(("50", "50"))
    assert rewards.shape == (2,)
    envs.close()

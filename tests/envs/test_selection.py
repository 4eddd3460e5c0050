"""Which tasks are used, and the rewards that a user puts on any environment."""

import asyncio

import pytest

from miles.config import build
from miles.envs.base import BaseEnv, Taskset
from miles.envs.rewards import JudgeConfig
from miles.envs.selection import SelectionConfig, selected
from miles.errors import ConfigError, EnvError
from miles.types import Score, Task, Transcript

SAID = Transcript(messages=(), final_text="four", turns=3)


class Env(BaseEnv):
    async def score(self, transcript):
        return Score(reward=1.0, parts={"right": 1.0, "brief": 0.5})


class Tasks(Taskset):
    name = "tasks"

    def __init__(self, **counts):
        self.counts = counts

    def splits(self):
        return tuple(self.counts)

    def tasks(self, split):
        return [Task(id=f"{split}/{n}", prompt=(), split=split) for n in range(self.counts.get(split, 0))]

    def env(self, task, sandbox):
        return Env(task)


def chosen(taskset, split="train", **settings):
    return [task.id for task in selected(taskset, build(SelectionConfig, settings), {}).tasks(split)]


def test_nothing_chosen_is_the_taskset_itself():
    taskset = Tasks(train=2, test=1)
    assert selected(taskset, SelectionConfig(), {}) is taskset


@pytest.mark.parametrize("name", ["eval", "validation", "dev"])
def test_usual_names_of_splits_are_known_and_others_can_be_said(name):
    assert chosen(Tasks(train=2, **{name: 1}), "test") == [f"{name}/0"]
    assert chosen(Tasks(hard=2, easy=1), "train", train="hard", test="easy") == ["hard/0", "hard/1"]


def test_skip_take_and_shuffle_by_seed():
    taskset = Tasks(train=6, test=6)
    assert chosen(taskset, skip=1, take=2) == ["train/1", "train/2"]
    assert chosen(taskset, "test", skip=1, take=2) == [f"test/{n}" for n in range(6)]
    assert chosen(taskset, "test", take_test=2) == ["test/0", "test/1"]
    one, two, other = (chosen(taskset, shuffle=seed) for seed in (1, 1, 2))
    assert one == two != other
    assert sorted(one) == [f"train/{n}" for n in range(6)]
    assert chosen(taskset, include=["train/4", "train/1"]) == ["train/1", "train/4"]
    assert chosen(taskset, exclude=["train/0"], take=1) == ["train/1"]


@pytest.mark.parametrize("name", ["example", "train", "test"])
def test_of_one_split_a_part_is_held_out_and_no_task_is_in_both(name):
    taskset = Tasks(**{name: 20})
    train, test = chosen(taskset), chosen(taskset, "test")
    assert (len(train), len(test)) == (18, 2)
    assert not set(train) & set(test)
    assert (chosen(taskset), chosen(taskset, "test")) == (train, test)
    assert len(chosen(taskset, "test", hold_out=0.5)) == 10
    assert chosen(Tasks(example=1)) == chosen(Tasks(example=1), "test") == ["example/0"]


def test_what_is_not_there_is_told():
    with pytest.raises(ConfigError, match="no split 'hard'; it has train, test"):
        chosen(Tasks(train=1, test=1), train="hard")
    with pytest.raises(ConfigError, match=r"no split 'train'; it has one, two: choose with env\.tasks"):
        chosen(Tasks(one=1, two=1))
    with pytest.raises(ConfigError, match="'test' both to train on and to test with"):
        chosen(Tasks(train=1, test=1), train="test")
    assert len(chosen(Tasks(train=3, test=0), "test")) == 1
    with pytest.raises(ConfigError, match="no task 'nine'"):
        chosen(Tasks(train=1, test=1), include=["nine"])


def as_said(task, transcript, score):
    return len(transcript.final_text)


async def later(task, transcript, score):
    await asyncio.sleep(0)
    return score.parts["brief"] * 2


def not_a_number(task, transcript, score):
    return float("nan")


def judged(**parts):
    return selected(Tasks(train=1, test=1), SelectionConfig(), {k: build(JudgeConfig, v) for k, v in parts.items()})


async def scored(taskset):
    return await taskset.env(taskset.tasks("train")[0], None).score(SAID)


async def test_a_reward_is_the_weighted_sum_of_its_own_parts_and_of_judges():
    me = f"{__name__}:"
    score = await scored(
        judged(
            right={"weight": 2.0},
            letters={"judge": f"{me}as_said", "weight": 0.1},
            double={"judge": f"{me}later", "weight": 0.0},
        )
    )
    assert score.reward == pytest.approx(2.0 * 1.0 + 0.1 * 4)
    assert score.parts == {"right": 1.0, "brief": 0.5, "score": 1.0, "letters": 4.0, "double": 1.0}


async def test_what_an_episode_hands_to_its_environment_goes_through_the_judges():
    class Needy(Env):
        more_sandboxes = None

    class Needing(Tasks):
        def env(self, task, sandbox):
            return Needy(task)

    taskset = selected(Needing(train=1, test=1), SelectionConfig(), {"right": JudgeConfig()})
    env = taskset.env(taskset.tasks("train")[0], None)
    assert hasattr(env, "more_sandboxes")
    env.more_sandboxes = "a way"
    assert env._env.more_sandboxes == "a way"


async def test_a_judge_that_gives_no_number_or_a_part_that_is_missing_is_the_environments_error():
    with pytest.raises(EnvError, match=r"judge 'odd'.*finite"):
        await scored(judged(odd={"judge": f"{__name__}:not_a_number"}))
    with pytest.raises(EnvError, match="no part 'colour'; it gave: right, brief, score"):
        await scored(judged(colour={}))
    with pytest.raises(ConfigError, match="no attribute 'nothing'"):
        judged(odd={"judge": f"{__name__}:nothing"})
    with pytest.raises(ConfigError, match="cannot be called"):
        judged(odd={"judge": f"{__name__}:SAID"})

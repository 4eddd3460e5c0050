"""Games of two players: two sessions, two trajectories, two rewards, one group."""

from miles.envs.base import ACT_TOOL, BaseEnv, Taskset
from miles.recipes.scripted import scripted_model
from miles.rollout.episode import EpisodeRunner, Job
from miles.rollout.players import play
from miles.rollout.scheduler import AsyncRollout, RolloutConfig
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.server import SessionServer
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend
from miles.trainer.data.rows import tree_rows
from miles.types import Episode, Faulted, Limits, Observation, Score, Scored, Step, Task, from_json, to_json


class Duel(BaseEnv):
    """Two say a number in turn, twice each; the larger sum wins."""

    player = 1

    async def reset(self):
        self.said = [[], []]
        return Observation(messages=({"role": "user", "content": "say a number"},), tools=(ACT_TOOL,))

    async def step(self, action):
        self.said[self.turn()].append(int(action))
        over = len(self.said[0]) == len(self.said[1]) == 2
        return Step(observation=f"the other said {action}", terminated=over, info={"player": self.turn()})

    def turn(self):
        return 1 if len(self.said[1]) == len(self.said[0]) else 0

    async def score(self, transcript):
        sums = [sum(said) for said in self.said]
        rewards = [1.0, -1.0] if sums[0] > sums[1] else [-1.0, 1.0]
        return Score(reward=rewards[0], parts={"player/0": rewards[0], "player/1": rewards[1]})


class Duels(Taskset):
    name, generation = "duels", "miles.rollout.players:play"

    def tasks(self, split):
        return [Task(id="duel", prompt=(), data={"players": 2})]

    def env(self, task, sandbox):
        return Duel(task)


async def run(replies, work, session=None):
    engine, rendering = scripted_model(replies)
    config = SandboxConfig()
    async with SessionServer(engine, rendering, session or SessionConfig()) as server:
        pool = SandboxPool(make_backend(config), config)
        runner = EpisodeRunner(Duels(), server, pool, play)
        return await work(runner)


SCRIPT = {"the other said": ["3", "5"], "*": ["4", "6"]}


async def test_every_player_has_its_own_trajectory_and_reward():
    episode = await run(SCRIPT, lambda runner: runner.run(Job(task=Duels().tasks("train")[0], group_id="g")))
    assert (episode.reward, [seat.reward for seat in episode.seats]) == (-1.0, [1.0])
    texts = [[turn.message["content"] for turn in one.tree.turns] for one in (episode, *episode.seats)]
    assert texts == [["3", "5"], ["4", "6"]]
    assert episode.tree.turns[0].messages == ({"role": "user", "content": "the other said 4"},)
    assert from_json(Episode, to_json(episode)) == episode


async def test_all_players_are_episodes_of_the_group_and_every_token_is_a_row_of_its_own():
    async def work(runner):
        config = RolloutConfig(groups_per_step=1, group_size=2)
        rollout = AsyncRollout(Duels().tasks("train"), runner, config)
        (group,) = await rollout.take(1)
        await rollout.close()
        return group

    group = await run(SCRIPT, work)
    assert [episode.reward for episode in group.episodes] == [-1.0, 1.0, -1.0, 1.0]
    assert all(not episode.seats for episode in group.episodes)
    owned = sum(int(row.owned.sum()) for episode in group.episodes for row in tree_rows(episode.tree))
    assert owned == sum(episode.tree.sampled_tokens for episode in group.episodes)


async def test_a_player_that_cannot_answer_faults_and_the_other_is_scored():
    async def work(runner):
        task = Task(id="duel", prompt=(), data={"players": 2}, limits=Limits(turns=1))
        return await runner.run(Job(task=task, group_id="g"))

    episode = await run(SCRIPT, work)
    assert isinstance(episode.outcome, Scored)
    assert isinstance(episode.seats[0].outcome, Faulted)
    assert episode.seats[0].outcome.reason == "turn_limit"

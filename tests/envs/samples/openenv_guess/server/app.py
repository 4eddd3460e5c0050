"""Two slots; a task provider with two splits; a hint of any size."""

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Told(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret, self.count = 0, 0

    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return {"train": 8, "test": 4}[split]

    def list_tasks(self, split):
        return [self.get_task(split, index) for index in range(self.num_tasks(split))]

    def get_task(self, split, index):
        return {"id": f"{split}-{index}"}

    def get_task_range(self, split, start, stop):
        return [self.get_task(split, index) for index in range(start, stop)]

    def reset(self, seed=None, episode_id=None, split="train", index=0, **more):
        self.secret, self.count = (index * 7 + len(split)) % 10, 0
        return Told(text="Guess a number from 0 to 9.", done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        self.count += 1
        if action.number == 99:
            return Told(text="x" * (3 << 20), done=False, reward=0.0)
        if action.number == 98:
            raise RuntimeError("the environment broke")
        if action.number == self.secret:
            return Told(text="right", done=True, reward=1.0)
        return Told(text="higher" if action.number < self.secret else "lower", done=self.count >= 6, reward=0.0)

    @property
    def state(self):
        return State(step_count=self.count)


app = create_app(GuessEnvironment, Guess, Told, env_name="openenv_guess", max_concurrent_envs=2)

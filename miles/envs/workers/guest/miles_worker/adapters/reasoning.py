"""reasoning-gym: questions made from seeds, one answer each. Settings: dataset, size, seed, and the dataset's own."""

import reasoning_gym
from miles_worker.protocol import Failure
from reasoning_gym.utils import extract_answer

_ASK = "\n\nGive your final answer between <answer> and </answer>."


def make(settings):
    return Reasoning(**settings)


class Reasoning:
    """Rows are made when they are played: some datasets take a second for each."""

    def __init__(self, dataset, size=1000, seed=0, ask=_ASK, **config):
        self.name, self.size, self.ask = dataset, size, ask
        try:
            self.sets = {
                split: reasoning_gym.create_dataset(dataset, size=size, seed=seed + shift, **config)
                for split, shift in (("train", 0), ("test", 1 << 20))
            }
        except (AssertionError, TypeError, ValueError) as error:
            raise Failure(f"reasoning-gym cannot make {dataset} with {config}: {error}", "task") from None

    def about(self):
        splits = {"train": self.size, "test": self.size}
        return {"name": self.name, "layer": "env", "splits": splits, "reward_range": [0.0, 1.0]}

    def tasks(self, split, start, stop):
        places = range(start, min(stop, self.size))
        return [{"id": f"{split}/{n}", "data": {"split": split, "index": n}} for n in places]

    def play(self, task, seed, host=None):
        dataset = self.sets[task["split"]]
        return Question(dataset, dataset[task["index"]], self.ask)

    def gold(self, task):
        answer = self.sets[task["split"]][task["index"]]["answer"]
        return None if answer is None else {"answer": f"<answer>{answer}</answer>"}


class Question:
    """One row. It is scored here: some rows do not survive JSON."""

    def __init__(self, dataset, entry, ask):
        self.dataset, self.entry, self.ask = dataset, entry, ask

    def reset(self):
        return {"messages": [{"role": "user", "content": self.entry["question"] + self.ask}]}

    def step(self, action):
        return {"observation": "this environment takes no actions: answer in text", "terminated": False}

    def score(self, transcript):
        text = transcript["final_text"]
        answer = extract_answer(text)
        try:
            reward = self.dataset.score_answer(answer=text.strip() if answer is None else answer, entry=self.entry)
        except Exception:  # scorers raise on what cannot be parsed: the answer is wrong, and that is the policy's
            reward = 0.0
        return {"reward": reward, "parts": {"tagged": float(answer is not None)}}

"""textarena: games of one or several players. Settings: id, players, count, most_steps.

Its games draw from Python's global generator: each game's own state is put there for the time of a call, one at a time.
"""

import contextlib
import io
import random
import threading

import textarena
from miles_worker.protocol import Failure

_LOCK = threading.Lock()


def make(settings):
    return Arena(**settings)


class Arena:
    """Every seed is a task."""

    def __init__(self, id, players=None, count=1024, most_steps=256):
        # The raw game tells what is new; the usual one repeats all that was said.
        self.id, self.count, self.most_steps = id, count, most_steps
        names = textarena.envs.registration.ENV_REGISTRY
        self.raw = id if id.endswith("-raw") or f"{id}-raw" not in names else f"{id}-raw"
        if self.raw not in names:
            raise Failure(f"textarena has no game {id}", "task")
        self.players = players or self._fewest()

    def _fewest(self):
        """Games do not say how many play: the smallest number that one accepts."""
        failed = None
        for players in range(1, 17):
            try:
                Game(self, players, 0).reset()
                return players
            except Exception as error:  # games refuse a number of players in their own ways
                failed = error
        raise Failure(f"textarena cannot start {self.id} with 1 to 16 players: {failed}", "task")

    def about(self):
        splits = {"train": self.count, "test": self.count}
        return {"name": self.id, "layer": "env", "splits": splits, "players": self.players}

    def tasks(self, split, start, stop):
        first = 0 if split == "train" else self.count
        places = range(first + start, first + min(stop, self.count))
        return [{"id": f"{split}/{n}", "data": {"seed": n, "players": self.players}} for n in places]

    def play(self, task, seed, host=None):
        return Game(self, self.players, task["seed"])

    def gold(self, task):
        return None


class Game:
    """One game; `player` in what it tells is whose turn it is."""

    def __init__(self, arena, players, seed):
        self.arena, self.players, self.seed = arena, players, seed
        self.steps, self.over, self.rewards = 0, False, None
        random.seed(seed)
        self.state = random.getstate()

    def _call(self, work):
        with _LOCK, contextlib.redirect_stdout(io.StringIO()):
            outer = random.getstate()
            random.setstate(self.state)
            try:
                return work()
            finally:
                self.state = random.getstate()
                random.setstate(outer)

    def reset(self):
        self.env = self._call(lambda: textarena.make(self.arena.raw))
        self._call(lambda: self.env.reset(num_players=self.players, seed=self.seed))
        player, text = self._observe()
        return {"messages": [{"role": "user", "content": text}], "tools": "act", "player": player}

    def _observe(self):
        player, told = self._call(self.env.get_observation)
        if isinstance(told, str):
            return player, told
        return player, "\n".join(text for sender, text, *_ in told if sender != player)

    def step(self, action):
        if self.over:
            return {"observation": "the game is over", "terminated": True}
        self.steps += 1
        done, _ = self._call(lambda: self.env.step(action))
        if done:
            self._end()
            return {"observation": "the game is over", "terminated": True}
        player, text = self._observe()
        return {"observation": text, "truncated": self.steps >= self.arena.most_steps, "info": {"player": player}}

    def _end(self):
        self.over = True
        rewards, _ = self._call(self.env.close)
        self.rewards = {player: self._number(reward) for player, reward in (rewards or {}).items()}

    def _number(self, reward):
        if isinstance(reward, str):
            raise Failure(f"{self.arena.id} gave {reward!r} as reward; it must be a number")
        return float(reward)

    def score(self, transcript):
        """What player 0 got; of an unfinished game nothing."""
        rewards = self.rewards or {}
        parts = {f"player/{player}": reward for player, reward in rewards.items()}
        return {"reward": rewards.get(0, 0.0), "parts": {**parts, "steps": float(self.steps)}}

    def close(self):
        pass

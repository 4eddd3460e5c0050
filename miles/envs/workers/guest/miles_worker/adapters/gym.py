"""Gymnasium: any registered environment is played by text. Settings: those of GymnasiumConfig."""

import json
import math
import re
import warnings

import gymnasium
import numpy
from miles_worker.protocol import Failure

# What the numbers of well-known environments mean; others tell themselves (get_action_meanings) or stay numbers.
_MEANINGS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "nothing", "right"),
    "Acrobot": ("push left", "nothing", "push right"),
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def make(settings):
    return Gym(**settings)


class Gym:
    """Every seed is a task."""

    def __init__(
        self, id, kwargs=None, count=1024, imports=(), invalid_reward=0.0, enforce_mask=False, make=None, **more
    ):
        for module in imports:  # packages that register their environments when imported
            __import__(module)
        self.id, self.count = id, count
        self.invalid_reward, self.enforce_mask = invalid_reward, enforce_mask
        self._make, self._kwargs = make, {**(kwargs or {}), **more}
        if make is None:
            try:
                spec = gymnasium.spec(id)
            except (gymnasium.error.Error, ImportError) as error:
                raise Failure(f"gymnasium does not know {id}: {error}", "task") from None
            modes = _render_modes(spec)
            if "render_mode" not in self._kwargs and "ansi" in modes:
                self._kwargs["render_mode"] = "ansi"
        try:
            self.make().close()
        except Exception as error:  # the boundary to an environment's code
            said = f"{type(error).__name__}: {error}"
            raise Failure(f"gymnasium cannot make {id} with {self._kwargs}: {said}", "task") from None

    def about(self):
        return {
            "name": self.id,
            "layer": "env",
            "splits": {"train": self.count, "test": self.count},
            "versions": {"gymnasium": gymnasium.__version__},
        }

    def tasks(self, split, start, stop):
        first = 0 if split == "train" else self.count
        return [
            {"id": f"{split}/{n}", "data": {"seed": n}} for n in range(first + start, first + min(stop, self.count))
        ]

    def play(self, task, seed, host=None):
        return Game(self, self.make(), task["seed"])

    def make(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._make() if self._make is not None else gymnasium.make(self.id, **self._kwargs)

    def gold(self, task):
        """The shortest way to a reward, where the environment shows its transitions (the toy-text ones do) and none of
        them is left to chance."""
        env = self.make()
        env.reset(seed=task["seed"])
        actions = _shortest(getattr(env.unwrapped, "P", None), getattr(env.unwrapped, "s", None))
        env.close()
        return None if actions is None else {"actions": [str(action) for action in actions]}

    def random_actions(self, task, seed, count):
        """Actions of the space, as text, the same for the same seed."""
        env = self.make()
        env.action_space.seed(seed)
        actions = [as_text(env.action_space, env.action_space.sample()) for _ in range(count)]
        env.close()
        return actions

    def meanings(self, env):
        told = getattr(env.unwrapped, "get_action_meanings", None)
        if callable(told):
            return tuple(str(word).lower() for word in told())
        return _MEANINGS.get(self.id.rpartition("/")[2].partition("-")[0], ())


class Game:
    """One episode; its score is the sum of its rewards."""

    def __init__(self, gym, env, seed):
        self.gym, self.env, self.seed = gym, env, seed
        self.total, self.steps, self.invalid, self.over = 0.0, 0, 0, False
        self.mask = None
        self.names = gym.meanings(env) if isinstance(env.action_space, gymnasium.spaces.Discrete) else ()

    def reset(self):
        self.total, self.steps, self.invalid, self.over = 0.0, 0, 0, False
        observation, info = self.env.reset(seed=self.seed)
        self.mask = info.get("action_mask")
        rules = describe(self.env.action_space, self.names)
        text = f"Act in {self.gym.id}, one action at a time with the act tool. An action is {rules}."
        text += f"\n{self.show(observation)}"
        return {"messages": [{"role": "user", "content": text}], "tools": "act"}

    def step(self, action):
        if self.over:
            return {"observation": "the episode is over", "terminated": True}
        try:
            parsed = parse(self.env.action_space, action, self.names)
            if self.gym.enforce_mask and self.mask is not None and not self.mask[parsed - self.env.action_space.start]:
                raise ValueError(f"{action.strip()} is not possible now")
        except ValueError as error:
            self.invalid += 1
            self.total += self.gym.invalid_reward
            return {"observation": f"invalid action: {error}", "reward": self.gym.invalid_reward}
        observation, reward, terminated, truncated, info = self.env.step(parsed)
        self.mask = info.get("action_mask")
        value = number(reward)
        self.total, self.steps = self.total + value, self.steps + 1
        self.over = bool(terminated or truncated)
        told = {} if self.env.observation_space.contains(observation) else {"outside_space": True}
        return {
            "observation": self.show(observation),
            "reward": value,
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "info": told,
        }

    def score(self, transcript):
        return {"reward": self.total, "parts": {"steps": float(self.steps), "invalid": float(self.invalid)}}

    def close(self):
        self.env.close()

    def show(self, observation):
        """The observation as text: the value, a drawing where the environment makes one, and what is possible now."""
        lines = [f"Observation: {shown(observation)}"]
        if self.env.render_mode == "ansi":
            drawing = self.env.render()
            lines.append(_COLOUR.sub("", drawing if isinstance(drawing, str) else drawing.getvalue()).strip("\n"))
        if self.mask is not None and isinstance(self.env.action_space, gymnasium.spaces.Discrete):
            start = int(self.env.action_space.start)
            allowed = [self.name(start + place) for place, possible in enumerate(self.mask) if possible]
            lines.append("Possible now: {}".format(", ".join(allowed)))
        return "\n".join(lines)

    def name(self, action):
        place = action - int(self.env.action_space.start)
        return f"{action} ({self.names[place]})" if place < len(self.names) else str(action)


def _shortest(transitions, start):
    """Breadth first over P[state][action] = [(probability, next state, reward, over)]."""
    if transitions is None or start is None:
        return None
    came, queue = {start: None}, [start]
    for state in queue:
        for action, outcomes in transitions[state].items():
            if len(outcomes) != 1:
                return None
            _, following, reward, over = outcomes[0]
            if over and reward > 0:
                actions = [action]
                while came[state] is not None:
                    state, earlier = came[state]
                    actions.append(earlier)
                return actions[::-1]
            if not over and following not in came:
                came[following] = (state, action)
                queue.append(following)
    return None


def number(reward):
    """One finite float, also of a one-element array."""
    try:
        value = float(reward.item() if hasattr(reward, "item") else reward)
    except (TypeError, ValueError):
        raise Failure(f"the environment returned {reward!r} as reward; it must be one number") from None
    if not math.isfinite(value):
        raise Failure(f"the environment returned {value} as reward; it must be finite")
    return value


def describe(space, names=()):
    """A space in words."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start + space.n - 1)
        if names:
            return "one of " + ", ".join(f"{first + n} ({name})" for n, name in enumerate(names))
        return f"an integer from {first} to {last}"
    if isinstance(space, spaces.Text):
        letters = "".join(sorted(space.character_set))
        return f"a text of {space.min_length} to {space.max_length} characters out of {letters[:100]!r}"
    if isinstance(space, spaces.MultiDiscrete):
        return f"a JSON list of integers, shape {list(space.shape)}, each from its start to below {space.nvec.tolist()}"
    if isinstance(space, spaces.MultiBinary):
        return f"a JSON list of 0s and 1s, shape {list(space.shape)}"
    if isinstance(space, spaces.Box):
        low, high = shown(space.low), shown(space.high)
        return f"a JSON list of numbers, shape {list(space.shape)}, from {low} to {high}"
    if isinstance(space, spaces.Tuple):
        return "a JSON list of: {}".format("; ".join(describe(part) for part in space.spaces))
    if isinstance(space, spaces.Dict):
        return "a JSON object with {}".format(
            "; ".join(f"{key}: {describe(part)}" for key, part in space.spaces.items())
        )
    raise Failure(
        f"actions of {space} cannot be written as text; wrap the environment with another space", "unsupported"
    )


def shown(value):
    """A value as short text: arrays as lists with four digits, large ones with their middle left out."""
    if isinstance(value, numpy.ndarray):
        return numpy.array2string(value, precision=4, separator=", ", threshold=512, suppress_small=True)
    if isinstance(value, dict):
        return "{{{}}}".format(", ".join(f"{key}: {shown(part)}" for key, part in value.items()))
    if isinstance(value, (tuple, list)):
        return "({})".format(", ".join(shown(part) for part in value))
    return str(value.item() if hasattr(value, "item") else value)


def parse(space, action, names=()):
    """An action out of text; ValueError says why it is none."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Text):
        if not space.contains(action):
            raise ValueError(f"{action!r} is not {describe(space)}")
        return action
    word = action.strip()
    if isinstance(space, spaces.Discrete) and word.lower() in names:
        return int(space.start) + names.index(word.lower())
    try:
        value = convert(space, json.loads(word))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        value = None
    if value is None or not space.contains(value):
        raise ValueError(f"{word[:200]!r} is not {describe(space, names)}")
    return value


def convert(space, value):
    """JSON as a value of the space."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Discrete):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError
        return value
    if isinstance(space, spaces.Tuple):
        return tuple(convert(part, one) for part, one in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Dict):
        return (
            {key: convert(part, value[key]) for key, part in space.spaces.items()} if isinstance(value, dict) else None
        )
    if isinstance(space, spaces.Text):
        return value
    return numpy.asarray(value, dtype=space.dtype).reshape(space.shape)


def as_text(space, action):
    """The inverse of `parse`."""
    if isinstance(space, gymnasium.spaces.Text):
        return str(action)
    return json.dumps(to_json(action))


def to_json(value):
    if isinstance(value, dict):
        return {key: to_json(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [to_json(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _render_modes(spec):
    try:
        entry = spec.entry_point
        env_class = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
        return env_class.metadata.get("render_modes") or ()
    except Exception:  # a class that is made otherwise; it draws nothing
        return ()

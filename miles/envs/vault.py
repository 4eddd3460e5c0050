"""The quickstart's task: follow notes through files of a sandbox to a key that nobody can guess.

The user names a file. The file says either `see NAME` or `key NN`; the agent reads files with its
shell tool, up to `depth` of them, and must end with `answer NN`. Guessing is right once in a hundred.
"""

import itertools
import random
from collections.abc import Iterator, Sequence

from pydantic import Field

from miles.config import Config
from miles.envs.base import BaseEnv, Demonstration, Solution, Taskset
from miles.errors import ConfigError
from miles.sandboxes.base import Sandbox, SandboxSpec
from miles.sandboxes.shell import SHELL_TOOL
from miles.types import Env, Message, Score, Task, Transcript

__all__ = ["KEYS", "NAMES", "VaultConfig", "VaultTaskset"]

_WORDS = """
amber anvil apple arrow badge basil beach berry birch blaze brick brook
cabin camel cedar chalk clock cloud coral crane daisy delta diner eagle
ember fable ferry flint frost ghost grape hazel honey ivory jewel lemon
lilac maple night ocean olive pearl piano quilt raven river stone tulip
"""
NAMES = tuple(_WORDS.split())
KEYS = tuple(f"{number:02d}" for number in range(100))


class VaultConfig(Config):
    """Sizes of the vault taskset."""

    train: int = Field(4096, gt=0)
    """Training tasks."""
    test: int = Field(200, gt=0)
    """Held-out tasks."""
    depth: int = Field(3, gt=0, le=48)
    """Most files on the way to the key."""
    seed: int = 0
    """Which tasks there are."""
    guess_first: float = 0.4
    """How often the demonstrations answer out of the blue before any file was read."""
    guess_later: float = 0.6
    """How often they do after a file that only names another file."""
    wrong_file: float = 0.05
    """How often they open a file at random."""


class VaultTaskset(Taskset):
    """No task of the test split is also one of the train split."""

    name = "vault"
    config_class = VaultConfig
    reward_range = (0.0, 1.0)

    def __init__(self, config: VaultConfig | None = None) -> None:
        self.config = config or VaultConfig()

    def tasks(self, split: str) -> Sequence[Task]:
        counts = {"train": self.config.train, "test": self.config.test}
        if split not in counts:
            raise ConfigError(f"env vault has no split {split!r}; it has train and test")
        if split == "train":
            return [self._task(split, index) for index in range(counts[split])]
        seen = {repr(task.data) for task in self.tasks("train")}
        fresh = (task for task in map(self._held_out, itertools.count()) if repr(task.data) not in seen)
        return list(itertools.islice(fresh, counts[split]))

    def _held_out(self, index: int) -> Task:
        return self._task("test", index)

    def _task(self, split: str, index: int) -> Task:
        rng = random.Random(f"{split}/{self.config.seed}/{index}")
        return _make_task(f"{split}/{index}", split, rng, self.config.depth)

    def vocabulary(self) -> tuple[str, ...]:
        """Words that a tokenizer made for this taskset should know whole."""
        missing = _missing("\0").partition("\0")
        return (*NAMES, *KEYS, "open ", "see ", "key ", "answer ", missing[0], missing[2])

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        return VaultEnv(task)

    async def solution(self, task: Task) -> Solution:
        return Solution(answer=f"answer {task.data['key']}")

    def sandbox(self, task: Task) -> SandboxSpec:
        return SandboxSpec(files={f"/workspace/{name}": text.encode() for name, text in task.data["files"].items()})

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """A hasty expert: it can do everything, and reinforcement learning has to teach it to look first."""
        rng = random.Random(f"demonstrations/{self.config.seed}/{seed}")
        while True:
            task = _make_task("demo", "demo", rng, self.config.depth)
            yield _demonstrate(task, rng, self.config), (SHELL_TOOL,)


class VaultEnv(BaseEnv):
    """Scores the last text: 1 for the key, else 0."""

    async def score(self, transcript: Transcript) -> Score:
        right = transcript.final_text.strip() == f"answer {self.task.data['key']}"
        return Score(reward=float(right), parts={"right": float(right), "turns": float(transcript.turns)})


def _make_task(task_id: str, split: str, rng: random.Random, depth: int) -> Task:
    names = rng.sample(NAMES, rng.randint(1, depth))
    key = rng.choice(KEYS)
    files = {name: f"see {following}" for name, following in itertools.pairwise(names)}
    files[names[-1]] = f"key {key}"
    prompt: Message = {"role": "user", "content": f"open {names[0]}"}
    return Task(id=task_id, prompt=(prompt,), data={"files": files, "key": key}, split=split)


def _demonstrate(task: Task, rng: random.Random, config: VaultConfig) -> tuple[Message, ...]:
    files: dict[str, str] = task.data["files"]
    messages = list(task.prompt)
    hint = str(task.prompt[0]["content"])
    for turn in range(config.depth + 2):
        word, _, value = hint.partition(" ")
        if word == "key":
            return (*messages, _say(f"answer {value}"))
        if rng.random() < (config.guess_first if word == "open" else config.guess_later):
            return (*messages, _say(f"answer {rng.choice(KEYS)}"))
        target = rng.choice(NAMES) if rng.random() < config.wrong_file else value
        messages += _look(f"call_{turn}", target, files.get(target, _missing(target)))
        hint = files.get(target, hint)
    return tuple(messages[:-1])


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _look(call_id: str, name: str, output: str) -> list[Message]:
    arguments = f'{{"command": "cat {name}"}}'
    call = {"id": call_id, "type": "function", "function": {"name": "shell", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": output},
    ]


def _missing(name: str) -> str:
    return f"cat: {name}: No such file or directory\n\n[exit code 1]"

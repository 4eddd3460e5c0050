"""`miles env init`: a package with a Taskset, a test and a README, ready to be trained on."""

import importlib.util
import re
from pathlib import Path

from miles.errors import ConfigError

__all__ = ["scaffold"]

_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
description = "An environment for Miles."
requires-python = ">=3.11"
dependencies = []

[project.entry-points."miles.envs"]
{name} = "{module}:{cls}"

[tool.setuptools]
py-modules = ["{module}"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_MODULE = '''\
"""{title}: add two numbers. Replace the tasks and the score with your own."""

import random
from collections.abc import Iterator, Sequence

from pydantic import Field

from miles.config import Config
from miles.envs.base import BaseEnv, Demonstration, Solution, Taskset
from miles.sandboxes.base import Sandbox
from miles.types import Env, Score, Task, Transcript


class {cls}Config(Config):
    """What users may set, as env.settings.train=…"""

    train: int = Field(2000, gt=0)
    """Training tasks."""
    test: int = Field(100, gt=0)
    """Held-out tasks."""


class {cls}(Taskset):
    """A task is a prompt and what scoring needs to know. `sandbox(task)` would give it a machine, too."""

    name = "{name}"
    config_class = {cls}Config
    reward_range = (0.0, 1.0)

    def __init__(self, config: {cls}Config | None = None) -> None:
        self.config = config or {cls}Config()

    def tasks(self, split: str) -> Sequence[Task]:
        count = self.config.train if split == "train" else self.config.test
        names = [f"{{split}}/{{number}}" for number in range(count)]
        return [_task(name, split, random.Random(name)) for name in names]

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        return {cls}Env(task)

    async def solution(self, task: Task) -> Solution:
        """What scores the most: `miles env test` plays it."""
        return Solution(answer=task.data["sum"])

    def vocabulary(self) -> Sequence[str]:
        """Words that a model made on the spot should know whole."""
        return [str(number) for number in range(19)]

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """For a warm start: right half of the time, so that there is something left to learn."""
        dice = random.Random(seed)
        while True:
            task = _task("demo", "demo", dice)
            answer = task.data["sum"] if dice.random() < 0.5 else str(dice.randrange(19))
            yield (*task.prompt, {{"role": "assistant", "content": answer}}), ()


class {cls}Env(BaseEnv):
    """One episode. Override reset and step for an environment with actions, score for its reward."""

    async def score(self, transcript: Transcript) -> Score:
        right = transcript.final_text.strip() == self.task.data["sum"]
        return Score(reward=float(right), parts={{"right": float(right)}})


def _task(name: str, split: str, dice: random.Random) -> Task:
    one, two = dice.randrange(10), dice.randrange(10)
    prompt = {{"role": "user", "content": f"{{one}} + {{two}} ="}}
    return Task(id=name, prompt=(prompt,), data={{"sum": str(one + two)}}, split=split)
'''

_TEST = """\
import asyncio

from {module} import {cls}

from miles.recipes.envcheck import check_env


def test_it_keeps_the_contract():
    report = asyncio.run(check_env({cls}(), tell=lambda *found: None))
    assert [found for found in report if found["status"] == "FAILED"] == []
"""

_README = """\
# {title}

An environment for [Miles](https://github.com/radixark/miles).

```
{steps}
```

`{module}.py` has the tasks and the reward; every class there may be replaced. `pyproject.toml` names the taskset in
the group `miles.envs`, so whoever installs the package can say `env.name={name}`.
"""

_RECIPE = """\
name = "{name}"
description = "A tiny model, made on the spot, learns {name} in about two minutes."

[env]
name = "{name}"

[model.tiny]
hidden = 64

[sampling]
max_tokens = 8

[rollout]
groups_per_step = 16
group_size = 8

[eval]
tasks = 100

[train]
steps = 40

[train.optim]
kind = "muon"
lr = 4e-3
decay_steps = 40
final_lr_ratio = 0.2

[train.warm_start]
steps = 400
batch = 32

[train.warm_start.optim]
kind = "muon"
lr = 8e-3
warmup_steps = 30
decay_steps = 400
beta2 = 0.98
"""


def scaffold(name: str, folder: Path) -> list[str]:
    """Write the package; the steps from there to a training run. ConfigError for a name that cannot be one."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigError(f"{name!r} cannot be a package's name: use small letters, digits and hyphens, as my-env")
    module = name.replace("-", "_")
    if importlib.util.find_spec(module) is not None:
        raise ConfigError(f"there is a module {module} already: choose another name")
    cls = "".join(word.capitalize() for word in name.split("-"))
    steps = [
        f"miles env add ./{folder.name}",
        f"miles env test {name}",
        f"miles launch {folder.name}/{name}.toml        # two minutes on two cores",
    ]
    words = {"name": name, "module": module, "cls": cls, "title": name.replace("-", " ").capitalize()}
    files = {
        "pyproject.toml": _PROJECT,
        f"{module}.py": _MODULE,
        f"tests/test_{module}.py": _TEST,
        "README.md": _README,
        f"{name}.toml": _RECIPE,
    }
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.format(**words, steps="\n".join(steps)))
    return steps

"""`terminal`: small real tasks in a Linux terminal, from easy to hard: files, text, git, bugs in Python.

A task is one file in `tasks/`: what the agent is told, the files and the set-up it finds, a solution, and checks. When
every process of the agent has ended, its work folder is copied into a fresh machine and checked there, by a Python that
it never had: what it did to the one it worked on, programs included, changes nothing. The checks come on that Python's
standard input and answer with a secret word, which the agent's programs that they run cannot read. Reward 1 when all of
them hold.
"""

import contextlib
import json
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Literal

from pydantic import Field

from miles.config import Config, build, read_toml
from miles.envs.base import BaseEnv, Demonstration, Solution, Taskset
from miles.errors import ConfigError, EnvError
from miles.sandboxes.base import Image, Sandbox, SandboxSpec
from miles.sandboxes.shell import SHELL_TOOL
from miles.types import Env, Message, Observation, Score, Task, Transcript

__all__ = ["TerminalConfig", "TerminalTaskset"]

Level = Literal["easy", "medium", "hard"]
_HERE = Path(__file__).parent
_LEVELS = {"easy": 0, "medium": 1, "hard": 2}
_MOST = 1 << 28
_TEST_EVERY = 4  # each kind and level is in both splits

_CHECKER = '''
import ctypes, os, signal, subprocess, sys
ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: what it runs cannot look into it
os.environ["GIT_NO_REPLACE_OBJECTS"] = "1"
def late(*_):
    raise TimeoutError("the checks took too long")
signal.signal(signal.SIGALRM, late)
signal.alarm(40)
passed, failed = 0, []
def check(name, holds):
    global passed
    passed += bool(holds)
    failed.extend([] if holds else [name])
def done(command, stdin, limit):
    return subprocess.run(command, shell=True, input=stdin, capture_output=True, text=True, timeout=limit)
def run(command, stdin="", limit=6):
    """Output of a shell command; what it does wrong is no output."""
    try:
        told = done(command, stdin, limit)
        return told.stdout if told.returncode == 0 else "FAILED " + str(told.returncode)
    except (subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        return "FAILED " + type(error).__name__
def code(command, limit=6):
    try:
        return done(command, "", limit).returncode
    except (subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
def raw(path):
    try:
        return open(path, "rb").read()
    except OSError:
        return b""
def text(path):
    return raw(path).decode(errors="replace").replace("\\r\\n", "\\n")
try:
    exec(compile(CHECKS, "checks", "exec"))
except Exception as error:  # the boundary to a task's checks
    failed.append(f"{type(error).__name__}: {error}")
print(WORD, passed, passed + len(failed), "; ".join(failed), flush=True)
os._exit(0)
'''


class TerminalTask(Config):
    """One file of `tasks/`."""

    level: Level
    """How hard it is."""
    kind: Literal["files", "text", "git", "python"]
    """What it is about."""
    prompt: str
    """What the agent is told."""
    files: dict[str, str] = Field(default_factory=dict)
    """Contents by path below the work folder."""
    setup: str = ""
    """A shell script that is run before the agent begins."""
    solution: str
    """A shell script that solves it."""
    checks: str
    """Python that calls check(name, holds), with run(command) and text(path)."""


class TerminalConfig(Config):
    """Which tasks, and where."""

    levels: tuple[Level, ...] = ("easy", "medium", "hard")
    """How hard."""
    kinds: tuple[Literal["files", "text", "git", "python"], ...] = ("files", "text", "git", "python")
    """What about."""
    image: Literal["sandbox", "built-in"] = "sandbox"
    """Where they are played: in the sandbox's own image (`local`: this host's programs), or in one that the provider
    builds from the Dockerfile of this environment."""


class TerminalTaskset(Taskset):
    """The tasks of `tasks/`, the easiest first."""

    name = "terminal"
    on_agent_failure = "score"  # a terminal is left as it is, and that counts
    reward_range = (0.0, 1.0)
    config_class = TerminalConfig

    def __init__(self, config: TerminalConfig | None = None) -> None:
        self.config = config or TerminalConfig()

    def tasks(self, split: str) -> Sequence[Task]:
        ordered = sorted(_all().items(), key=lambda item: (_LEVELS[item[1].level], item[0]))
        chosen = [
            (name, task)
            for place, (name, task) in enumerate(ordered)
            if (place % _TEST_EVERY == _TEST_EVERY - 1) == (split == "test")
            and task.level in self.config.levels
            and task.kind in self.config.kinds
        ]
        return [
            Task(
                id=name,
                split=split,
                prompt=({"role": "user", "content": task.prompt.strip()},),
                data={"level": task.level, "kind": task.kind},
            )
            for name, task in chosen
        ]

    def sandbox(self, task: Task) -> SandboxSpec:
        files = {f"/workspace/{path}": text.encode() for path, text in _all()[task.id].files.items()}
        image = Image(dockerfile=_HERE / "image") if self.config.image == "built-in" else None
        return SandboxSpec(files=files, image=image)

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        if sandbox is None:
            raise EnvError("the terminal tasks need a sandbox")
        return TerminalEnv(task, sandbox, _all()[task.id], self.sandbox(task))

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """A shell that is given the solution at once."""
        order = list(self.tasks("train"))
        random.Random(seed).shuffle(order)
        for task in cycle(order):
            arguments = json.dumps({"command": _all()[task.id].solution.strip()})
            call = {"id": "call_0", "type": "function", "function": {"name": "shell", "arguments": arguments}}
            messages: list[Message] = [
                *task.prompt,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_0", "content": ""},
                {"role": "assistant", "content": "Done."},
            ]
            yield tuple(messages), (SHELL_TOOL,)

    async def solution(self, task: Task) -> Solution:
        return Solution(commands=(_all()[task.id].solution,))


class TerminalEnv(BaseEnv):
    """One task in its sandbox."""

    more_sandboxes: Callable[[SandboxSpec], contextlib.AbstractAsyncContextManager[Sandbox]]
    """Set by whoever runs the episode."""

    def __init__(self, task: Task, sandbox: Sandbox, told: TerminalTask, spec: SandboxSpec) -> None:
        super().__init__(task)
        self._sandbox, self._told, self._spec = sandbox, told, spec
        self.more_sandboxes = _none

    async def reset(self) -> Observation:
        if self._told.setup:
            done = await self._sandbox.exec(["/bin/sh", "-e", "-c", self._told.setup])
            if done.exit_code != 0:
                raise EnvError(f"the set-up of {self.task.id} failed: {done.text[-500:]}")
        return await super().reset()

    async def score(self, transcript: Transcript) -> Score:
        packed = await self._sandbox.exec(["tar", "-cf", "-", "."], timeout_s=30.0, max_output=_MOST)
        if packed.exit_code != 0 or packed.truncated:  # it made what it was to leave unreadable, or filled the disk
            return Score(reward=0.0, parts={"checks": 0.0})
        async with self.more_sandboxes(replace(self._spec, files={})) as fresh:
            unpacked = await fresh.exec(["tar", "-xpf", "-"], stdin=packed.stdout, timeout_s=30.0)
            if unpacked.exit_code != 0:
                raise EnvError(f"the work folder cannot be copied: {unpacked.text[-300:]}")
            return await self._checked(fresh)

    async def _checked(self, sandbox: Sandbox) -> Score:
        word = secrets.token_hex(16)
        source = f"CHECKS = {self._told.checks!r}\nWORD = {word!r}\n{_CHECKER}"
        done = await sandbox.exec(["python3", "-I", "-S", "-"], stdin=source.encode(), timeout_s=50.0)
        if done.exit_code == 127:
            raise EnvError("the sandbox's image has no python3, which the checks need")
        lines = done.stdout.decode(errors="replace").splitlines() if done.exit_code == 0 else []
        told = next((line.split(" ", 3) for line in reversed(lines) if line.startswith(f"{word} ")), None)
        if told is None:
            return Score(reward=0.0, parts={"checks": 0.0})
        passed, total = int(told[1]), int(told[2])
        return Score(reward=float(0 < total == passed), parts={"checks": passed / max(1, total)})


def _none(spec: SandboxSpec) -> contextlib.AbstractAsyncContextManager[Sandbox]:
    raise EnvError("this environment scores in a machine of its own: set env.more_sandboxes")


@cache
def _all() -> dict[str, TerminalTask]:
    found = {}
    for path in sorted((_HERE / "tasks").glob("*.toml")):
        told = read_toml(path)
        try:
            found[path.stem] = build(TerminalTask, told)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}") from error
    return found

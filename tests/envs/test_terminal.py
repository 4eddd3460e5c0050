"""The terminal tasks: how many, how graded, and that an honest solution alone scores."""

import asyncio
from collections import Counter

import pytest

from miles.config import build
from miles.envs.base import Solution
from miles.envs.terminal.taskset import TerminalConfig, TerminalTaskset
from miles.recipes.envcheck import check_env
from miles.sandboxes.local.backend import LocalBackend
from miles.types import Transcript

NOTHING = Transcript(messages=(), final_text="", turns=0)


def test_more_than_thirty_tasks_of_each_kind_and_level():
    both = [task for split in ("train", "test") for task in TerminalTaskset().tasks(split)]
    assert len({task.id for task in both}) == len(both) == 32
    assert Counter(task.data["level"] for task in both) == {"easy": 13, "medium": 11, "hard": 8}
    assert Counter(task.data["kind"] for task in both) == {"python": 9, "files": 8, "text": 8, "git": 7}
    assert {task.data["level"] for task in TerminalTaskset().tasks("test")} == {"easy", "medium", "hard"}
    hard = TerminalTaskset(build(TerminalConfig, {"levels": ["hard"], "kinds": ["git"]}))
    assert [task.id for split in ("train", "test") for task in hard.tasks(split)] == ["git-bisect", "git-remove-secret"]


async def score(task_id, *commands):
    """What a terminal is worth after these commands."""
    taskset = TerminalTaskset()
    task = next(task for split in ("train", "test") for task in taskset.tasks(split) if task.id == task_id)
    backend = LocalBackend()
    await backend.probe()
    sandbox = await backend.create(taskset.sandbox(task))
    try:
        env = taskset.env(task, sandbox)
        await env.reset()
        for command in commands:
            await sandbox.exec(command)
        await sandbox.quiesce()
        return await env.score(NOTHING)
    finally:
        await sandbox.destroy()


async def test_part_of_it_is_told_and_not_rewarded():
    found = await score("python-sum-range", "echo 'print(12)' > total.py")
    assert found.reward == 0.0
    assert found.parts == {"checks": 0.25}


@pytest.mark.parametrize(
    "trick",
    [
        "printf 'import os\\nos._exit(0)\\n' > total.py",
        "printf 'import os, signal\\nos.kill(os.getppid(), 9)\\n' > total.py",
        "printf 'print(\"0\" * 32, 4, 4)\\n' > total.py",
        "mkdir -p json subprocess; echo 'raise SystemExit(0)' | tee json/__init__.py subprocess/__init__.py > os.py",
    ],
    ids=["exits", "kills the checker", "prints a verdict", "shadows modules"],
)
async def test_a_trick_scores_nothing(trick):
    assert (await score("python-sum-range", trick)).reward == 0.0


@pytest.mark.slow
def test_every_solution_scores_and_nothing_else_does():
    report = asyncio.run(check_env(TerminalTaskset(), tasks=40, tell=lambda *found: None))
    assert [found for found in report if found["status"] == "FAILED"] == []
    held = {found["check"]: found["detail"] for found in report if found["status"] == "ok"}
    assert held["a solution scores the most"].count("1") == 32


async def test_a_solution_is_one_script():
    solution = await TerminalTaskset().solution(TerminalTaskset().tasks("train")[0])
    assert isinstance(solution, Solution)
    assert len(solution.commands) == 1

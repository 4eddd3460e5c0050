"""The terminal tasks: how many, how graded, and that an honest solution alone scores."""

import asyncio
from collections import Counter

import pytest

from miles.config import build
from miles.envs.base import Solution
from miles.envs.terminal.taskset import TerminalConfig, TerminalTaskset
from miles.recipes.envcheck import check_env
from miles.sandboxes.local.backend import LocalBackend
from miles.sandboxes.pool import SandboxPool
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
        env.more_sandboxes = SandboxPool(backend).sandbox
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


# Looks for the secret word in the memory of whoever runs it, says it in its place, and ends it.
SPY = r"""cat > total.py <<'P'
import ctypes, os, re, signal
pid = os.getppid()
while b"python3\0-I" not in open(f"/proc/{pid}/cmdline", "rb").read():
    pid = int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
words = set()
with open(f"/proc/{pid}/mem", "rb", 0) as memory:
    for line in open(f"/proc/{pid}/maps"):
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        try:
            memory.seek(first)
            words |= set(re.findall(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", memory.read(last - first)))
        except (OSError, OverflowError, ValueError):
            continue
libc = ctypes.CDLL(None)
out = libc.syscall(438, libc.syscall(434, pid, 0), 1, 0)
for word in words:
    os.write(out, word + b" 4 4 \n")
os.kill(pid, signal.SIGKILL)
P"""


@pytest.mark.parametrize(
    "trick",
    [
        "printf 'import os\\nos._exit(0)\\n' > total.py",
        "printf 'import os, signal\\nos.kill(os.getppid(), 9)\\n' > total.py",
        "printf 'print(\"0\" * 32, 4, 4)\\n' > total.py",
        SPY,
        pytest.param("printf 'while True: pass' > total.py", marks=pytest.mark.slow),
        "chmod 000 total.py",
        "mkdir -p json subprocess; echo 'raise SystemExit(0)' | tee json/__init__.py subprocess/__init__.py > os.py",
    ],
    ids=["exits", "kills the checker", "prints a verdict", "spies", "loops", "hides", "shadows modules"],
)
async def test_a_trick_scores_nothing(trick):
    assert (await score("python-sum-range", trick)).reward == 0.0


@pytest.mark.slow
def test_every_solution_scores_and_nothing_else_does():
    report = asyncio.run(check_env(TerminalTaskset(), tasks=40, tell=lambda *found: None))
    assert [found for found in report if found["status"] == "FAILED"] == []
    held = {found["check"]: found["detail"] for found in report if found["status"] == "ok"}
    assert held["a solution scores the most"].count("1") == 32


ALTERNATIVES = {
    "text-json-flatten": [
        """python3 -c '
import csv, json
people = sorted(json.load(open("people.json")), key=lambda one: one["born"])
out = csv.writer(open("emails.csv", "w", newline=""), quoting=csv.QUOTE_ALL)
out.writerow(["name", "email"])
out.writerows([one["name"], mail] for one in people for mail in one["emails"])'"""
    ],
    "text-log-report": ["printf '200 3 1800\\n304 1 0\\n404 2 512' > report.txt"],
    "files-duplicates": ["cd photos; rm c.jpg d.jpg 'g h.jpg'; printf 'c.jpg\\nd.jpg\\ng h.jpg' > ../deleted.txt"],
}


@pytest.mark.parametrize("name", ALTERNATIVES)
async def test_another_right_way_scores(name):
    assert (await score(name, *ALTERNATIVES[name])).reward == 1.0


WRONG = {
    "git-remove-secret": "git checkout -q --orphan other && git commit -q -m one && git checkout -q main && "
    "git replace main other",
    "git-bisect": "echo 'raise SystemExit(0)' > check.py; git log --format='%H %s' | grep 'step 17$' | cut -d' ' -f1 "
    "> culprit.txt; git add check.py; git commit -q -m x",
    "git-move-commit": "git branch search HEAD~1; git reset -q --hard HEAD~1; git checkout -q search; "
    "git commit -q --allow-empty -m 'Add search'; git checkout -q main; printf 'tea\\nmilk\\n' > todo.txt",
    "files-tar-repair": "mkdir site; tar -xf site.tar -C site; rm -r site/cache; sed -i 's/\\r$//' site/index.html; "
    "tar -czf clean.tar.gz site",
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_way_that_looks_right_scores_nothing(name):
    assert (await score(name, WRONG[name])).reward == 0.0


async def test_a_solution_is_one_script():
    solution = await TerminalTaskset().solution(TerminalTaskset().tasks("train")[0])
    assert isinstance(solution, Solution)
    assert len(solution.commands) == 1

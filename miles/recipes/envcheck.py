"""`miles env test`: what every environment must keep, tried on a few of its tasks. Works on any Taskset."""

import contextlib
import json
import math
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.envs.base import Solution, Taskset
from miles.errors import ConfigError, MilesError, raised
from miles.recipes.config import EnvSection, SamplingSection
from miles.recipes.evaluate import EvaluateConfig, playing
from miles.recipes.scripted import scripted_model
from miles.rollout.episode import Job
from miles.sandboxes.base import Sandbox
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend
from miles.types import Env, Faulted, Observation, Score, Scored, Step, Task, Transcript

__all__ = ["CHECKS", "check_env"]

Tell = Callable[[str, str, str], None]
_REWARD_FILES = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json", "/workspace/reward.txt", "/tmp/reward.txt")
_RANDOM = 8  # actions of a random game


class _LeftOut(Exception):
    """The check does not apply to this environment."""


def _must(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


@dataclass
class _Checked:
    """One environment under test."""

    taskset: Taskset
    tasks: list[Task]
    pool: SandboxPool
    backend: str
    scores: dict[tuple[str, str], float] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def live(self, task: Task) -> AsyncIterator[tuple[Env, Sandbox | None, Observation]]:
        """A new episode after its reset."""
        spec = self.taskset.sandbox(task)
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await stack.enter_async_context(self.pool.sandbox(spec)) if spec is not None else None
            env = self.taskset.env(task, sandbox)
            if hasattr(env, "more_sandboxes"):
                env.more_sandboxes = self.pool.sandbox
            stack.push_async_callback(env.close)
            yield env, sandbox, await env.reset()

    async def score(self, task: Task, solution: Solution, *, tamper: bool = False) -> Score:
        """What an episode that plays `solution` scores."""
        if self.taskset.harness == "own":
            return await self._own(task, solution)
        async with self.live(task) as (env, sandbox, observation):
            if sandbox is not None:
                for path, data in solution.files.items():
                    await sandbox.write(path, data)
                for command in solution.commands:
                    await sandbox.exec(command, timeout_s=300.0)
                if tamper:
                    await _write_rewards(sandbox)
            for action in solution.actions:
                step = await env.step(action)
                if step.terminated or step.truncated:
                    break
            if sandbox is not None:
                await sandbox.quiesce()
            answer = {"role": "assistant", "content": solution.answer}
            messages = (*observation.messages, answer)
            return await env.score(Transcript(messages=messages, final_text=solution.answer, turns=1))

    async def _own(self, task: Task, solution: Solution) -> Score:
        """Its own agent plays, and the model says the solution."""
        replies = [*solution.actions, solution.answer]
        config = EvaluateConfig(
            env=EnvSection(name=self.taskset.name),
            model="scripted:",
            sandbox=SandboxConfig(backend=self.backend),
            sampling=SamplingSection(max_tokens=4096),
            split=task.split,
        )
        with tempfile.TemporaryDirectory(prefix="miles-check-") as folder:
            async with playing(config, self.taskset, Path(folder), scripted_model({"*": list(replies)})) as runner:
                episode = await runner.run(Job(task=task, group_id="check"))
        outcome = episode.outcome
        if isinstance(outcome, Faulted):
            return Score(reward=0.0)
        _must(isinstance(outcome, Scored), f"task {task.id}: {outcome.kind} {getattr(outcome, 'detail', '')[-600:]}")
        assert isinstance(outcome, Scored)
        return Score(reward=outcome.reward, parts=outcome.parts)


async def _tasks(checked: _Checked) -> str:
    counts, seen = {}, []
    for split in ("train", "test"):
        tasks = checked.taskset.tasks(split)
        _must(len(tasks) > 0, f"split {split} is empty")
        ids = [task.id for task in tasks]
        _must(len(set(ids)) == len(ids), f"split {split} has tasks with the same id")
        counts[split] = len(tasks)
        seen.append(set(ids))
    both = seen[0] & seen[1]
    _must(not both or len(seen[0]) == 1, f"{len(both)} tasks are in both splits, as {sorted(both)[:1]}")
    return ", ".join(f"{count} {split}" for split, count in counts.items())


async def _reset(checked: _Checked) -> str:
    for task in checked.tasks:
        async with checked.live(task) as (_, _, observation):
            own = checked.taskset.harness == "own"
            _must(
                own or bool(observation.messages or task.prompt), f"task {task.id}: the agent sees nothing after reset"
            )
            for message in observation.messages:
                _must(message.get("role") in ("system", "user", "assistant", "tool"), f"role {message.get('role')!r}")
            for tool in observation.tools:
                _must(tool.get("type") == "function" and "name" in tool["function"], f"tool {tool!r} is malformed")
    return f"{len(checked.tasks)} tasks"


async def _seeds(checked: _Checked) -> str:
    """The same task begins the same, and answers the same to the same actions."""
    for task in checked.tasks:
        first, second = await _game(checked, task), await _game(checked, task)
        _must(first == second, f"task {task.id} differs when it is played twice: {_difference(first, second)}")
    return "played twice"


async def _game(checked: _Checked, task: Task) -> list[Any]:
    async with checked.live(task) as (env, _, observation):
        told: list[Any] = [list(observation.messages)]
        for action in await _some_actions(checked, task, observation):
            step = await env.step(action)
            told.append((step.observation, step.reward, step.terminated, step.truncated))
            if step.terminated or step.truncated:
                break
        return told


async def _some_actions(checked: _Checked, task: Task, observation: Observation) -> list[str]:
    if not observation.tools or checked.taskset.harness == "own":
        return []
    drawn = await checked.taskset.random_actions(task, _RANDOM)
    if drawn:
        return drawn
    solution = await checked.taskset.solution(task)
    return list(solution.actions) if solution is not None else []


def _difference(one: list[Any], two: list[Any]) -> str:
    at = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return f"after {at} actions: {str(one[at : at + 1])[:200]} against {str(two[at : at + 1])[:200]}"


async def _spaces(checked: _Checked) -> str:
    """Actions out of its space are taken, observations are in theirs, nonsense is answered."""
    steps: list[Step] = []
    for task in checked.tasks:
        async with checked.live(task) as (env, _, observation):
            if not observation.tools or checked.taskset.harness == "own":
                raise _LeftOut("it takes no actions")
            name = observation.tools[0]["function"]["name"]
            call = json.dumps({"name": name, "arguments": {"no such": []}})
            await env.step("\0 no action" if name == "act" else call)
        async with checked.live(task) as (env, _, observation):
            for action in await _some_actions(checked, task, observation):
                steps.append(await env.step(action))
                _must(not steps[-1].info.get("outside_space"), f"{steps[-1].observation[:200]!r} is not in its space")
                if steps[-1].terminated or steps[-1].truncated:
                    break
    return f"{len(steps)} actions"


async def _no_op(checked: _Checked) -> str:
    for task in checked.tasks:
        score = await checked.score(task, Solution())
        _must(math.isfinite(score.reward), f"task {task.id}: {score.reward}")
        checked.scores[task.id, "no-op"] = score.reward
        least = _range(checked)[0]
        _must(least is None or score.reward <= least, f"task {task.id} gives {score.reward:g} for nothing at all")
    return _told(checked, "no-op")


async def _gold(checked: _Checked) -> str:
    known = 0
    for task in checked.tasks:
        solution = await checked.taskset.solution(task)
        if solution is None:
            continue
        known += 1
        score = await checked.score(task, solution)
        checked.scores[task.id, "gold"] = score.reward
        nothing = checked.scores.get((task.id, "no-op"), -math.inf)
        _must(
            score.reward > nothing, f"task {task.id}: the solution scores {score.reward:g}, nothing scores {nothing:g}"
        )
        most = _range(checked)[1]
        _must(most is None or score.reward >= most, f"task {task.id}: the solution scores {score.reward:g} of {most}")
    if not known:
        raise _LeftOut("it knows no solutions")
    return _told(checked, "gold")


async def _stable(checked: _Checked) -> str:
    for task in checked.tasks:
        solution = await checked.taskset.solution(task) or Solution()
        found = {(await checked.score(task, solution)).reward for _ in range(3)}
        _must(
            len(found) == 1, f"task {task.id} scores {', '.join(f'{value:g}' for value in sorted(found))} for the same"
        )
    return "3 times each"


async def _early(checked: _Checked) -> str:
    """An agent that writes reward files where scorers look for them gains nothing."""
    for task in checked.tasks:
        if checked.taskset.sandbox(task) is None or checked.taskset.harness == "own":
            raise _LeftOut("it has no sandbox of ours")
        score = await checked.score(task, Solution(), tamper=True)
        honest = checked.scores.get((task.id, "no-op"), score.reward)
        _must(score.reward <= honest, f"task {task.id}: a reward file of the agent's own gives {score.reward:g}")
    return f"{len(_REWARD_FILES)} files"


async def _write_rewards(sandbox: Sandbox) -> None:
    for path in _REWARD_FILES:
        data = b'{"reward": 1.0}' if path.endswith("json") else b"1.0\n"
        with contextlib.suppress(MilesError, OSError):
            await sandbox.write(path, data)


async def _close(checked: _Checked) -> str:
    for task in checked.tasks:
        async with checked.live(task) as (env, _, _):
            await env.close()
    return "twice"


def _range(checked: _Checked) -> tuple[float | None, float | None]:
    return checked.taskset.reward_range or (None, None)


def _told(checked: _Checked, what: str) -> str:
    found = [value for (_, kind), value in checked.scores.items() if kind == what]
    return f"reward {', '.join(f'{value:g}' for value in found)}"


CHECKS: dict[str, Callable[[_Checked], Awaitable[str]]] = {
    "tasks by split, ids unique": _tasks,
    "reset shows something": _reset,
    "the same task plays the same": _seeds,
    "spaces are honest": _spaces,
    "nothing scores the least": _no_op,
    "a solution scores the most": _gold,
    "scoring is stable": _stable,
    "an early reward file gains nothing": _early,
    "close, twice": _close,
}


async def check_env(taskset: Taskset, *, tasks: int = 3, backend: str = "local", tell: Tell) -> list[dict[str, str]]:
    """Every check with its status ("ok", "FAILED", "left out") and detail. The taskset is closed at the end."""
    config = SandboxConfig(backend=backend)
    report = []
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(taskset.close)
        pool = SandboxPool(make_backend(config), config)
        stack.push_async_callback(pool.close)
        both = [*taskset.tasks("train"), *taskset.tasks("test")]
        chosen = list({task.id: task for task in both}.values())[:tasks]
        if any(taskset.sandbox(task) is not None for task in chosen):
            await pool.start()
        checked = _Checked(taskset, chosen, pool, backend)
        for name, check in CHECKS.items():
            status, detail = await _tried(check, checked)
            tell(name, status, detail)
            report.append({"check": name, "status": status, "detail": detail})
    return report


async def _tried(check: Callable[[_Checked], Awaitable[str]], checked: _Checked) -> tuple[str, str]:
    try:
        return "ok", await check(checked)
    except _LeftOut as reason:
        return "left out", str(reason)
    except ConfigError:
        raise
    except AssertionError as wrong:
        return "FAILED", str(wrong)
    except Exception as error:  # noqa: BLE001  the boundary to an environment's code
        ours = isinstance(error, MilesError)
        return "FAILED", f"{type(error).__name__}: {str(error)[-800:]}" if ours else raised(error)[-1000:]

"""An episode's life: sandbox, reset, agent, score, clean-up, under deadlines; every way it can end is an Outcome.

Two of the plug layers meet here. The generation layer is `async generate(context) -> Episode`; the
agent layer is one such function, `AgentGenerate`, around a harness.
"""

import asyncio
import contextlib
import logging
import math
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from pydantic import Field

from miles.config import Config
from miles.envs.base import Taskset
from miles.errors import ContextOverflow, EngineError, EnvError, HarnessError, SandboxError
from miles.harnesses.base import AgentContext, Endpoint, EnvTools, Harness, SessionNeeds
from miles.rollout.session.server import SessionServer
from miles.rollout.session.session import Session
from miles.sandboxes.base import Sandbox, SandboxSpec
from miles.sandboxes.pool import SandboxPool
from miles.types import (
    Discarded,
    Env,
    Episode,
    Faulted,
    Limits,
    Observation,
    Outcome,
    Score,
    Scored,
    Step,
    Task,
    Transcript,
    Tree,
)

__all__ = ["AgentGenerate", "EpisodeConfig", "EpisodeRunner", "Generate", "GenerateContext", "Job"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_LOG_LINES, _LOG_CHARS = 200, 2000
_CANCEL_S = 10.0  # what code gets to clean up after its deadline


class EpisodeConfig(Config):
    """Deadlines of one episode, in seconds. A task's own limits win."""

    wall_s: float = Field(300.0, gt=0)
    """The whole episode."""
    reset_s: float = Field(60.0, gt=0)
    """The environment's reset."""
    agent_s: float = Field(240.0, gt=0)
    """The agent's work."""
    score_s: float = Field(60.0, gt=0)
    """Scoring."""
    turns: int = Field(32, gt=0)
    """Model calls."""
    tokens: int = Field(65_536, gt=0)
    """Sampled tokens."""
    context: int | None = Field(None, gt=0)
    """Tokens of prompt and answer of one model call; None: what the engine can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One episode to run."""

    task: Task
    group_id: str
    index: int = 0
    attempt: int = 0

    @property
    def episode_id(self) -> str:
        return f"{self.group_id}/{self.index}.{self.attempt}"


async def _contained(work: Awaitable[T]) -> T:
    """Foreign code must not end the driver: `sys.exit()` in a task would go through the event loop."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"the code called sys.exit({error.code})") from error


class _GuardedEnv:
    """An Env whose `step` fails as an EnvError, whatever it raises: that is never the policy's fault."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.stepping = False

    async def step(self, action: str) -> Step:
        self.stepping = True
        try:
            step = await self._env.step(action)
            self.stepping = False  # a cancelled step stays one: whoever holds the deadline asks
            if not isinstance(step, Step):
                raise EnvError(f"step({action!r}) returned {type(step).__name__}, and must return a Step")
            return step
        except (SandboxError, EnvError):
            raise
        except Exception as error:  # the boundary to an environment's code
            raise EnvError(f"step({action!r}) failed: {traceback.format_exc()[-1500:]}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class _Discard(Exception):
    """Infrastructure failed: leaves the episode with this outcome."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.outcome = Discarded(reason=reason, detail=detail[-2000:])


@dataclass(kw_only=True)
class GenerateContext:
    """What the generation layer gets: the task, sessions, sandboxes, and the clock of one episode."""

    job: Job
    taskset: Taskset
    server: SessionServer
    config: EpisodeConfig
    pool: SandboxPool
    deadline: float
    timings: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    finished: Episode | None = None

    @property
    def task(self) -> Task:
        return self.job.task

    @contextlib.asynccontextmanager
    async def session(self, harness: Harness | None = None) -> AsyncIterator[Session]:
        """A private endpoint for this episode, as the harness wants it; ended at the end of the block."""
        config, needs = self.config, getattr(harness, "needs", None) or SessionNeeds()
        own = Limits(turns=config.turns, tokens=config.tokens, wall_s=config.wall_s, context=config.context)
        told = {"report_truncation": needs.report_truncation, "wishes": needs.wishes}
        changes: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
        session = self.server.open(self.task.limits or own, canonicalisers=needs.canonicalisers, **changes)
        try:
            yield session
        finally:
            await self.server.end(session)

    @contextlib.asynccontextmanager
    async def sandbox(self, harness: Harness | None = None) -> AsyncIterator[Sandbox | None]:
        """The machine that the task asks for, as the harness wants it, or None."""
        spec = self.taskset.sandbox(self.task)
        if (machine := getattr(harness, "machine", None)) is not None:
            if (prepare := getattr(harness, "prepare", None)) is not None:
                await asyncio.to_thread(prepare)
            spec = machine(spec, self.pool.capabilities)
        if spec is None:
            yield None
            return
        spec = replace(spec, labels={**spec.labels, "episode": self.job.episode_id})
        began = time.monotonic()
        async with self.pool.sandbox(spec) as sandbox:
            self.timings["sandbox"] = time.monotonic() - began
            yield sandbox

    def endpoint(self, session: Session) -> Endpoint:
        """What an agent is told of its model."""
        context, most = self.server.room(session)
        base_url = self.server.base_url(session)
        return Endpoint(base_url=base_url, api_key=session.key, context=context, max_tokens=most)

    def env(self, sandbox: Sandbox | None) -> Env:
        """The environment of this episode; it may ask for more machines."""
        env = self.taskset.env(self.task, sandbox)
        if hasattr(env, "more_sandboxes"):
            env.more_sandboxes = self.another
        return env

    def another(self, spec: SandboxSpec) -> contextlib.AbstractAsyncContextManager[Sandbox]:
        """A second machine of this episode, as for a verifier that the agent has never seen."""
        return self.pool.sandbox(replace(spec, labels={**spec.labels, "episode": self.job.episode_id}))

    def agent_limit_s(self) -> float:
        """Seconds that the agent may use: what the wall leaves when scoring keeps its share."""
        left = self.deadline - time.monotonic()
        reserve = min(self.score_limit_s(), 0.2 * left)
        told = self.taskset.seconds(self.task).get("agent", self.config.agent_s)
        own = left if self.task.limits is not None else told
        return max(0.0, min(own, left - reserve))

    def score_limit_s(self) -> float:
        """Seconds that scoring may use."""
        return self.taskset.seconds(self.task).get("score", self.config.score_s)

    async def phase(self, name: str, work: Awaitable[T], limit_s: float) -> T:
        """Await with a deadline and a stopwatch; raises TimeoutError, also when the work will not be cancelled."""
        began = time.monotonic()
        task = asyncio.ensure_future(_contained(work))
        try:
            await asyncio.wait({task}, timeout=min(limit_s, max(0.0, self.deadline - began)))
            if task.cancelled():
                raise RuntimeError(f"{name} cancelled itself")
            if task.done():
                return await task
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_S)
            if not task.done():
                log.warning("%s of episode %s ignores its cancellation; it is left behind", name, self.job.episode_id)
            raise TimeoutError
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_S)
            raise
        finally:
            self.timings[name] = time.monotonic() - began

    def log(self, text: str) -> None:
        """Keep a line of the agent's; floods are cut."""
        if len(self.lines) < _LOG_LINES:
            self.lines.append(text[:_LOG_CHARS])

    def discarded(self, reason: str, detail: str) -> Episode:
        """Infrastructure failed: nothing of this attempt is trained."""
        return self.episode(Tree(), Discarded(reason=reason, detail=detail))

    def episode(self, tree: Tree, outcome: Outcome) -> Episode:
        """The finished value; what is slow afterwards, as a clean-up, does not take it back."""
        job = self.job
        self.finished = Episode(
            id=job.episode_id,
            task_id=job.task.id,
            group_id=job.group_id,
            index=job.index,
            attempt=job.attempt,
            split=job.task.split,
            tree=tree,
            outcome=outcome,
            timings=self.timings,
            log=tuple(self.lines),
        )
        return self.finished


Generate = Callable[[GenerateContext], Awaitable[Episode]]


class EpisodeRunner:
    """Runs jobs; never raises but for cancellation: a failure is the episode's outcome."""

    def __init__(
        self,
        taskset: Taskset,
        server: SessionServer,
        pool: SandboxPool,
        generate: Generate,
        config: EpisodeConfig | None = None,
    ) -> None:
        self.config = config or EpisodeConfig()
        self._taskset, self._server, self._pool, self._generate = taskset, server, pool, generate
        most = taskset.concurrency  # what waits for its turn uses up no deadline
        self._turn: contextlib.AbstractAsyncContextManager[object]
        self._turn = asyncio.Semaphore(most) if most is not None else contextlib.nullcontext()

    def metrics(self) -> dict[str, float]:
        """Of the sandboxes, since the last call."""
        return self._pool.metrics()

    async def run(self, job: Job) -> Episode:
        """One attempt at a task."""
        async with self._turn:
            return await self._run(job)

    def _wall_s(self, task: Task) -> float:
        """The recipe's, or what the phases of a task that has its own deadlines may need together."""
        own, config = self._taskset.seconds(task), self.config
        if not own:
            return config.wall_s
        return max(config.wall_s, config.reset_s + own.get("agent", config.agent_s) + own.get("score", config.score_s))

    async def _run(self, job: Job) -> Episode:
        wall = job.task.limits.wall_s if job.task.limits else self._wall_s(job.task)
        began = time.monotonic()
        context = GenerateContext(
            job=job,
            taskset=self._taskset,
            server=self._server,
            config=self.config,
            pool=self._pool,
            deadline=began + wall,
        )
        try:
            async with asyncio.timeout(wall + 5):  # phases hold the deadline; this catches a layer that does not
                episode = await _contained(self._generate(context))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise  # the run's own wish; any other cancellation is the episode's failure
            episode = context.episode(Tree(), Discarded(reason="generation_failed", detail="it cancelled itself"))
        except TimeoutError:
            late = Discarded(reason="wall_timeout", detail=f"{wall:g} s")
            episode = context.finished or context.episode(Tree(), late)
        except _Discard as discard:
            episode = context.episode(Tree(), discard.outcome)
        except SandboxError as error:
            episode = context.episode(Tree(), Discarded(reason="sandbox", detail=str(error)))
        except ContextOverflow as error:
            episode = context.episode(Tree(), Faulted(reason="context_length_exceeded", detail=str(error)))
        except EngineError as error:
            episode = context.episode(Tree(), Discarded(reason="engine", detail=str(error)))
        except Exception:  # noqa: BLE001  one episode's failure must not end its siblings or the run
            episode = context.episode(
                Tree(), Discarded(reason="generation_failed", detail=traceback.format_exc()[-2000:])
            )
        context.timings["total"] = time.monotonic() - began
        return episode


class AgentGenerate:
    """The agent layer: a harness acts against the session, then the environment scores. Its steps are there for
    generation layers of several agents, too."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.makes_machines = hasattr(harness, "machine")
        """Whether there is a sandbox also where the task asks for none."""

    async def __call__(self, context: GenerateContext) -> Episode:
        async with context.sandbox(self.harness) as sandbox:
            env = context.env(sandbox)
            try:
                observation = await self.reset(context, env)
                async with context.session(self.harness) as session:
                    fault = await self.act(context, env, observation, sandbox, session)
                    transcript, tree = session.transcript(), await session.close()
                if sandbox is not None:
                    await sandbox.quiesce()
                outcome = await self.judge(context, env, transcript, fault)
                return context.episode(tree, outcome)
            finally:
                await _close(env)

    async def reset(self, context: GenerateContext, env: Env) -> Observation:
        """The environment's beginning, in its time; leaves the episode as discarded where that fails."""
        try:
            observation = await context.phase("reset", env.reset(), context.config.reset_s)
            if not isinstance(observation, Observation):
                raise TypeError(f"reset() returned {type(observation).__name__}, and must return an Observation")
            return observation
        except TimeoutError:
            raise _Discard("reset_timeout", f"{context.config.reset_s:g} s") from None
        except SandboxError:
            raise
        except Exception:  # noqa: BLE001  the boundary to an environment's code
            raise _Discard("reset_failed", traceback.format_exc()) from None

    async def act(
        self,
        context: GenerateContext,
        env: Env,
        observation: Observation,
        sandbox: Sandbox | None,
        session: Session,
    ) -> Faulted | None:
        """Let the harness run. Returns the policy's fault; leaves the episode as discarded for infrastructure's."""
        limit_s = context.agent_limit_s()
        guarded = _GuardedEnv(env)
        session.tools = EnvTools(cast(Env, guarded), observation.tools)
        agent = AgentContext(
            task=context.task,
            env=cast(Env, guarded),
            observation=observation,
            sandbox=sandbox,
            endpoint=context.endpoint(session),
            deadline=time.monotonic() + limit_s,
            log=context.log,
            tools=session.tools,
            progress=session.progress,
        )
        fault: Faulted | None = None
        try:
            await context.phase("agent", self.harness.run(agent), limit_s)
        except TimeoutError:
            if session.waiting_for_engine:
                raise _Discard("engine_slow", "the deadline passed while a model call was being answered") from None
            if guarded.stepping:
                raise _Discard("env_step_timeout", "the deadline passed while the environment took a step") from None
            fault = Faulted(reason="agent_timeout", detail=f"{limit_s:g} s")
        except SandboxError:
            raise
        except EnvError as error:
            raise _Discard("env_step_failed", str(error)) from None
        except EngineError as error:
            raise _Discard("engine", session.engine_failure or str(error)) from None
        except HarnessError as error:
            fault = Faulted(reason=error.reason, detail=str(error)[-2000:])
        except Exception:  # noqa: BLE001  the boundary to an agent's code
            fault = Faulted(reason="agent_crashed", detail=traceback.format_exc()[-2000:])
        await _discard_if_infrastructure_failed(session, agent.deadline, fault)
        return fault

    @staticmethod
    async def judge(context: GenerateContext, env: Env, transcript: Transcript, fault: Faulted | None) -> Outcome:
        """The environment's score, or the fault where that ends an episode."""
        if fault is not None and context.taskset.on_agent_failure == "fault":
            return fault
        try:
            score = await context.phase("score", env.score(transcript), context.score_limit_s())
        except TimeoutError:
            return Discarded(reason="score_timeout", detail=f"{context.score_limit_s():g} s")
        except SandboxError as error:
            return Discarded(reason="sandbox", detail=str(error))
        except Exception:  # noqa: BLE001  the boundary to an environment's code
            return Discarded(reason="score_failed", detail=traceback.format_exc()[-2000:])
        return _scored(score)


async def _discard_if_infrastructure_failed(session: Session, deadline: float, fault: Faulted | None) -> None:
    """Leaves the episode where the records show a failure that is not the agent's, whatever the agent made of it."""
    try:
        await session.tools.close(max(0.1, deadline - time.monotonic()))
    except TimeoutError:
        raise _Discard("env_step_timeout", "the environment was still taking a step when the agent ended") from None
    if session.tools.failure is not None:
        raise _Discard("env_step_failed", str(session.tools.failure))
    if session.engine_failure is not None:  # a call that never succeeded, also when the harness said nothing
        raise _Discard("engine", session.engine_failure)
    if not session.tree().turns:
        raise _Discard("no_model_call", fault.detail if fault else "the agent ended without asking the model")


def _scored(score: Any) -> Outcome:
    """A score as an outcome; anything but finite numbers is the environment's bug, never a reward."""
    value = score.reward if isinstance(score, Score) else score
    parts = score.parts if isinstance(score, Score) else {}
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return Discarded(reason="score_not_finite", detail=f"score() returned {score!r}; a reward is one finite number")
    return Scored(reward=float(value), parts=dict(parts))


async def _close(env: Env) -> None:
    try:
        await asyncio.wait_for(env.close(), 10)
    except Exception:  # the boundary to an environment's code
        log.warning("env.close() failed", exc_info=True)

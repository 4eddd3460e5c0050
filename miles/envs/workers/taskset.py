"""A taskset whose environments live in a worker: tasks are listed, episodes played and scored over its protocol."""

import asyncio
import base64
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from pydantic import Field

from miles.config import Config
from miles.envs.base import ACT_TOOL, BaseEnv, Solution, Taskset
from miles.envs.rewards import as_float, as_score, reward_of
from miles.envs.workers.process import PROTOCOL, WorkerProcess, quiet_environment
from miles.errors import EnvError, SandboxError
from miles.sandboxes.base import Sandbox, SandboxSpec
from miles.types import Env, Observation, Score, Step, Task, Transcript

__all__ = ["WorkerConfig", "WorkerEnv", "WorkerTaskset", "Workers"]

log = logging.getLogger(__name__)
_PAGE = 1000
_PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)  # before a life, by deaths in a row
_CLOSE_S = 5.0
_FILE = 1 << 26  # bytes of a file that a worker may read


class WorkerConfig(Config):
    """A worker of one environment."""

    name: str
    """The environment's name."""
    python: Path
    """The interpreter that has its packages."""
    kind: str
    """Adapter: a module of the guest, or FILE.py."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """What the adapter is made with."""
    paths: tuple[Path, ...] = ()
    """Folders on its Python's path."""
    cwd: Path | None = None
    """Its working directory; None: the present one."""
    log: Path = Path("env.log")
    """Where its output goes."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables beside the usual ones."""
    secrets: tuple[str, ...] = ()
    """Names of variables of ours that it may see."""
    concurrency: int | None = Field(None, gt=0)
    """Episodes at a time; None: what the environment says."""
    endless: int = Field(4096, gt=0)
    """Tasks taken of a split that has no end."""
    start_s: float = Field(120.0, gt=0)
    """Seconds until its packages are imported and it has answered."""


class Workers:
    """One worker at a time, started when needed, replaced when it died or hangs. Safe from any thread."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self._lock = threading.RLock()
        self._process: WorkerProcess | None = None
        self._tired: list[WorkerProcess] = []
        self._deaths = 0
        self._about: dict[str, Any] | None = None
        self.lives = 0

    def now(self) -> WorkerProcess:
        """The worker that takes new episodes; starts one, waiting longer after each death in a row. Blocks.

        EnvError, with the end of its log, when it does not come up, or died too often.
        """
        with self._lock:
            if self._process is not None and not self._process.ended and not self._process.tired:
                return self._process
            self._leave()
            if self._deaths >= len(_PAUSES_S):
                raise EnvError(
                    f"env {self.config.name!r}: its worker died {self._deaths} times in a row; see {self.config.log}"
                )
            time.sleep(_PAUSES_S[self._deaths])
            self._deaths += 1
            self._process = self._begin()
            self._deaths -= 1  # it lives
            return self._process

    def _begin(self) -> WorkerProcess:
        config = self.config
        began = time.monotonic()
        process = WorkerProcess.start(
            config.python,
            config.kind,
            log=config.log,
            environment=quiet_environment(config.secrets, config.environment),
            cwd=config.cwd,
            paths=config.paths,
            limit_s=config.start_s,
        )
        try:
            left = max(1.0, config.start_s - (time.monotonic() - began))
            self._about = process.call("hello", protocol=PROTOCOL, settings=config.settings).result(left)
        except TimeoutError as error:
            process.close()
            raise EnvError(
                f"env {config.name!r}: its worker was not ready within {config.start_s:g} s; see {config.log}"
            ) from error
        except BaseException:
            process.close()
            raise
        self.lives += 1
        return process

    def _leave(self) -> None:
        """The present worker gets no new episodes: the dead one goes now, a tired one with its last episode."""
        if self._process is None:
            return
        if self._process.ended:
            self._deaths += 1
            self._process.close()
        else:
            self._tired.append(self._process)
            self.tidy()
        self._process = None

    def tidy(self) -> None:
        """End tired workers that nobody uses any more."""
        with self._lock:
            done = [process for process in self._tired if not process.episodes]
            self._tired = [process for process in self._tired if process.episodes]
        for process in done:
            process.close()

    def well(self) -> None:
        """An episode ended as it should: deaths begin to count anew."""
        self._deaths = 0

    @property
    def about(self) -> dict[str, Any]:
        """What the adapter says of itself."""
        if self._about is None:
            self.now()
        assert self._about is not None
        return self._about

    def close(self) -> None:
        """End every worker. Safe to call twice."""
        with self._lock:
            for process in (*self._tired, *([self._process] if self._process else [])):
                process.close()
            self._tired, self._process = [], None


class WorkerTaskset(Taskset):
    """Tasks and episodes of an environment in another process. `close` ends it."""

    config_class = WorkerConfig

    def __init__(self, config: WorkerConfig) -> None:
        self.config, self.name = config, config.name
        self.workers = Workers(config)
        self._tasks: dict[str, list[Task]] = {}

    @property
    def about(self) -> Mapping[str, Any]:
        """What the adapter says of itself: layer, splits, versions."""
        return self.workers.about

    @property
    def harness(self) -> str:  # type: ignore[override]  # known only when the worker has answered
        return "own" if self.about.get("layer") == "agent" else "react"

    @property
    def concurrency(self) -> int | None:  # type: ignore[override]
        return self.config.concurrency or self.about.get("concurrency")

    @property
    def generation(self) -> str:  # type: ignore[override]
        return "miles.rollout.players:play" if self.about.get("players", 1) > 1 else ""

    @property
    def reward_range(self) -> tuple[float, float] | None:  # type: ignore[override]
        told = self.about.get("reward_range")
        return (as_float(told[0]), as_float(told[1])) if told else None

    def splits(self) -> Sequence[str]:
        return tuple(self.about["splits"])

    def tasks(self, split: str) -> Sequence[Task]:
        """Listed once, a page at a time; of an endless split the first `endless` ones."""
        if split not in self._tasks:
            count = self.about["splits"].get(split, 0)
            stop = self.config.endless if count is None else count
            pages = range(0, stop, _PAGE)
            worker = self.workers.now()
            listed = [
                worker.call("tasks", split=split, start=at, stop=min(at + _PAGE, stop)).result(self.config.start_s)
                for at in pages
            ]
            self._tasks[split] = [as_task(told, split) for told in itertools.chain(*listed)]
        return self._tasks[split]

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        return WorkerEnv(task, self.workers, sandbox, self.sandbox(task) if sandbox is not None else None)

    async def random_actions(self, task: Task, count: int) -> list[str]:
        worker = await asyncio.to_thread(self.workers.now)
        drawn: list[str] = await worker.ask("random_actions", task=task.data, count=count)
        return drawn

    async def solution(self, task: Task) -> Solution | None:
        worker = await asyncio.to_thread(self.workers.now)
        told = await worker.ask("gold", task=task.data)
        return None if told is None else as_solution(told)

    async def close(self) -> None:
        await asyncio.to_thread(self.workers.close)


def as_task(told: Mapping[str, Any], split: str) -> Task:
    prompt = told.get("prompt") or ()
    if isinstance(prompt, str):
        prompt = ({"role": "user", "content": prompt},)
    return Task(id=str(told["id"]), prompt=tuple(prompt), data=dict(told.get("data") or {}), split=split)


class WorkerEnv(BaseEnv):
    """One episode in a worker."""

    _numbers = itertools.count(1)

    more_sandboxes: Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]] | None = None
    """Set by the episode: makes another machine."""

    def __init__(
        self, task: Task, workers: Workers, sandbox: Sandbox | None = None, spec: SandboxSpec | None = None
    ) -> None:
        super().__init__(task)
        self.episode = f"e{next(self._numbers)}"
        self.player = 0
        self._workers, self._spec = workers, spec
        self._boxes = {0: sandbox} if sandbox is not None else {}
        self._stack = contextlib.AsyncExitStack()
        self._process: WorkerProcess | None = None
        self._log: Any = None

    async def reset(self) -> Observation:
        self._process = process = await asyncio.to_thread(self._workers.now)
        process.episodes.add(self.episode)
        process.listen(self.episode, self._answer)
        seed = self.task.data.get("seed")
        told = await process.ask("reset", episode=self.episode, task=self.task.data, seed=seed)
        self.player = told.get("player", 0)
        return as_observation(told, self.task)

    async def step(self, action: str) -> Step:
        return as_step(await self._asked().ask("step", episode=self.episode, action=action))

    async def run(self, endpoint: Mapping[str, str], timeout_s: float, log: Any) -> None:
        """Let the environment's own agent work against `endpoint` (base_url, api_key, model)."""
        self._log = log
        await self._asked().ask("run", episode=self.episode, endpoint=dict(endpoint), timeout_s=timeout_s)

    async def score(self, transcript: Transcript) -> Score:
        told = transcript_told(transcript)
        score = as_score(await self._asked().ask("score", episode=self.episode, transcript=told))
        self._workers.well()
        return score

    async def close(self) -> None:
        """A worker in which something hangs is replaced; it ends with its last episode."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await process.ask("close", episode=self.episode)
        except TimeoutError:
            log.warning(
                "env %s: episode %s does not end; its worker is replaced", self._workers.config.name, self.task.id
            )
            process.tired = True
        except EnvError as error:
            log.warning("env %s: close failed: %s", self._workers.config.name, error)
        finally:
            process.forget(self.episode)
            await self._stack.aclose()
            process.episodes.discard(self.episode)
            await asyncio.to_thread(self._workers.tidy)

    def _asked(self) -> WorkerProcess:
        if self._process is None:
            raise EnvError("reset comes before step, run and score")
        return self._process

    async def _answer(self, method: str, params: dict[str, Any]) -> Any:
        """What the worker asks of Miles: the sandboxes of this episode, and its log."""
        if method == "log":
            if self._log is not None:
                self._log(params["text"])
            return None
        box = params.pop("box", 0)
        if method == "open":
            return await self._open(box)
        sandbox = self._boxes.get(box)
        if sandbox is None:
            raise SandboxError("this task has no such sandbox")
        if method == "exec":
            return await _exec(sandbox, params)
        if method == "read":
            return {"data": base64.b64encode(await sandbox.read(params["path"], max_bytes=_FILE)).decode()}
        if method == "write":
            await sandbox.write(params["path"], base64.b64decode(params["data"]))
            return {}
        raise EnvError(f"a worker may ask for open, exec, read, write and log, not for {method!r}")

    async def _open(self, box: int) -> dict[str, Any]:
        """Another sandbox like the episode's; it lives as long as the episode."""
        if self.more_sandboxes is None or self._spec is None:
            raise SandboxError("no second sandbox can be had here")
        opened = self.more_sandboxes(self._spec)
        sandbox = await opened.__aenter__()
        if self._process is None:  # the episode has ended meanwhile
            await opened.__aexit__(None, None, None)
            raise SandboxError("the episode is over")
        self._stack.push_async_exit(opened)
        self._boxes[box] = sandbox
        return {}


async def _exec(sandbox: Sandbox, params: dict[str, Any]) -> dict[str, Any]:
    raw = params.pop("raw", False)
    if "stdin" in params:
        params["stdin"] = base64.b64decode(params["stdin"])
    done = await sandbox.exec(params.pop("command"), **params)

    def told(data: bytes) -> str:
        return base64.b64encode(data).decode() if raw else data.decode("utf-8", "replace")

    return {
        "exit_code": done.exit_code,
        "stdout": told(done.stdout),
        "stderr": told(done.stderr),
        "outcome": done.outcome,
    }


def transcript_told(transcript: Transcript) -> dict[str, Any]:
    """To the wire."""
    return {"messages": list(transcript.messages), "final_text": transcript.final_text, "turns": transcript.turns}


def as_solution(told: Mapping[str, Any]) -> Solution:
    """From the wire."""
    return Solution(
        actions=tuple(told.get("actions") or ()),
        answer=told.get("answer") or "",
        commands=tuple(told.get("commands") or ()),
    )


def as_observation(told: Mapping[str, Any], task: Task) -> Observation:
    """From the wire: `messages`, or a `text` after the task's prompt; `tools`, or `act` for the one tool."""
    messages = told.get("messages")
    if messages is None:
        text = told.get("text")
        messages = [*task.prompt, *([{"role": "user", "content": text}] if text else [])]
    tools = told.get("tools")
    return Observation(messages=tuple(messages), tools=(ACT_TOOL,) if tools == "act" else tuple(tools or ()))


def as_step(told: Mapping[str, Any]) -> Step:
    """From the wire; EnvError for a reward that is none."""
    return Step(
        observation=str(told["observation"]),
        reward=reward_of(told),
        terminated=bool(told.get("terminated")),
        truncated=bool(told.get("truncated")),
        info=dict(told.get("info") or {}),
    )

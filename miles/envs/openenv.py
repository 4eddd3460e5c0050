"""OpenEnv: a server of environments, ours to start or already running, played over its WebSocket.

Only the WebSocket keeps an episode: `/reset` and `/step` over HTTP make a new environment each time. A connection is an
episode and takes one of the server's slots; connections beyond them are turned away, so ours wait and try again.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import Field

from miles.config import Config, build
from miles.envs.base import BaseEnv, Taskset
from miles.envs.rewards import reward_of
from miles.envs.workers.process import end_of, end_with_children, launched, quiet_environment
from miles.envs.workers.taskset import WorkerConfig
from miles.errors import ConfigError, EnvError
from miles.processes import scratch_folder
from miles.sandboxes.base import Sandbox
from miles.types import Env, Observation, Score, Step, Task, ToolSpec, Transcript

__all__ = ["OpenEnvConfig", "OpenEnvTaskset"]

log = logging.getLogger(__name__)
_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # before a slot is asked for again; the last one repeats
_ANSWER_S = 30.0


class OpenEnvConfig(Config):
    """A server, or the folder that it is started from."""

    url: str = ""
    """Base URL of a server that runs."""
    folder: Path | None = None
    """Folder with openenv.yaml, to start one."""
    app: str = ""
    """Its ASGI app, as server.app:app; empty: what openenv.yaml says."""
    count: int = Field(1024, gt=0)
    """Tasks (seeds) of each split, where the environment lists none."""
    instruction: str = ""
    """Text before the first observation."""
    field: str = ""
    """The field of observations that the model sees; empty: all that are not empty."""


class OpenEnvTaskset(Taskset):
    """Tasks as its TaskProvider lists them, else seeds."""

    def __init__(self, worker: WorkerConfig) -> None:
        self.name, self._worker = worker.name, worker
        self.config = build(OpenEnvConfig, worker.settings)
        self.concurrency = worker.concurrency
        self._server: _Server | None = None
        self._starting = threading.Lock()
        if not self.config.url and self.config.folder is None:
            raise ConfigError(f"environment {worker.name!r} needs settings.url or settings.folder")
        self._tasks: dict[str, list[Task]] | None = None
        self._schema: dict[str, Any] = {}

    def url(self) -> str:
        """Where the server is; starts ours, or starts it anew when it has died. Blocks."""
        if self.config.url:
            return (
                self.config.url.replace("wss://", "https://")
                .replace("ws://", "http://")
                .rstrip("/")
                .removesuffix("/ws")
            )
        with self._starting:
            if self._server is None or self._server.ended:
                if self._server is not None:
                    self._server.close()
                self._server = _Server(self._worker, self.config)
            return self._server.url

    def splits(self) -> Sequence[str]:
        return tuple(self._listed())

    def tasks(self, split: str) -> Sequence[Task]:
        return self._listed().get(split, [])

    def _listed(self) -> dict[str, list[Task]]:
        if self._tasks is None:
            url = self.url()
            self._schema = _get(f"{url}/schema").get("action") or {}
            self._tasks = self._provided(url) or {
                split: [
                    Task(id=f"{split}/{seed}", prompt=(), data={"reset": {"seed": seed}}, split=split)
                    for seed in range(first, first + self.config.count)
                ]
                for split, first in (("train", 0), ("test", self.config.count))
            }
        return self._tasks

    def _provided(self, url: str) -> dict[str, list[Task]] | None:
        """What the environment's TaskProvider lists; None where it has none."""
        try:
            (name, *_) = _get(f"{url}/list_environments")
            splits = [split["name"] for split in _get(f"{url}/{name}/splits")]
            counts = {split: _get(f"{url}/{name}/num_tasks", {"split": split})["num_tasks"] for split in splits}
        except (EnvError, ValueError, LookupError, TypeError):
            return None
        return {
            split: [
                Task(id=f"{split}/{n}", prompt=(), data={"reset": {"split": split, "index": n, "seed": n}}, split=split)
                for n in range(count)
            ]
            for split, count in counts.items()
        }

    def env(self, task: Task, sandbox: Sandbox | None) -> Env:
        self._listed()
        return _OpenEnv(task, self)

    @property
    def calls_tools(self) -> bool:
        """Whether actions are calls of tools that the environment lists (an MCP environment)."""
        kind = self._schema.get("properties", {}).get("type", {})
        return "call_tool" in (kind.get("const"), kind.get("default"))

    def step_tool(self) -> ToolSpec:
        """One tool whose arguments are the environment's action."""
        properties = {k: v for k, v in self._schema.get("properties", {}).items() if k != "metadata"}
        parameters = {**self._schema, "properties": properties}
        text = "Take one action in the environment and see what it answers."
        return {"type": "function", "function": {"name": "step", "description": text, "parameters": parameters}}

    async def close(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.close)


class _OpenEnv(BaseEnv):
    """One connection; its score is the sum of the rewards it sent."""

    def __init__(self, task: Task, taskset: OpenEnvTaskset) -> None:
        super().__init__(task)
        self._taskset, self._total, self._steps = taskset, 0.0, 0
        self._http: aiohttp.ClientSession | None = None
        self._link: aiohttp.ClientWebSocketResponse | None = None
        self._inbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
        self._over = False

    async def reset(self) -> Observation:
        url = await asyncio.to_thread(self._taskset.url)
        self._http = aiohttp.ClientSession()
        attempt = 0
        while (told := await self._connected(url)) is None:  # until the phase's deadline
            await asyncio.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
            attempt += 1
        self._total = reward_of(told)
        tools: list[ToolSpec] = [self._taskset.step_tool()]
        if self._taskset.calls_tools:
            listed = await self._ask("step", {"type": "list_tools"})
            tools = [_tool(tool) for tool in listed["observation"].get("tools") or ()]
        instruction = self._taskset.config.instruction
        text = "\n".join(filter(None, [instruction, self._shown(told["observation"])]))
        text = text or "Act with the tools that you are offered."
        return Observation(messages=({"role": "user", "content": text},), tools=tuple(tools))

    async def _connected(self, url: str) -> dict[str, Any] | None:
        """A new connection and its first observation; None when all slots are taken."""
        assert self._http is not None
        try:
            self._link = await self._http.ws_connect(f"{url}/ws", max_msg_size=0)
        except aiohttp.ClientError as error:
            raise EnvError(f"the OpenEnv server at {url} does not answer: {error}") from error
        self._inbox = asyncio.Queue()
        # Always reading: the server drops who does not answer its pings while a model thinks.
        self._reading = asyncio.ensure_future(self._read(self._link, self._inbox))
        try:
            return await self._ask("reset", self.task.data["reset"])
        except _NoSlot:
            await self._hang_up()
            return None

    async def _read(self, link: aiohttp.ClientWebSocketResponse, inbox: "asyncio.Queue[dict[str, Any] | None]") -> None:
        try:
            async for message in link:
                if message.type is aiohttp.WSMsgType.TEXT:
                    inbox.put_nowait(json.loads(message.data))
        except ValueError:
            log.warning("%s sent what is no JSON", self._taskset.name)
        finally:
            inbox.put_nowait(None)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self._link is None:
            raise EnvError("reset comes before step")
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # what it said before it closed is in the inbox
            await self._link.send_json({"type": kind, "data": data})
        told = await self._inbox.get()
        if told is None:
            raise EnvError(
                f"the OpenEnv server closed the connection (code {self._link.close_code}) after {kind} {data}"
            )
        if told.get("type") == "error":
            error = told["data"]
            if error.get("code") == "CAPACITY_REACHED":
                raise _NoSlot(error.get("message"))
            if error.get("code") == "VALIDATION_ERROR":
                raise _Refused(
                    "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.get("errors", ()))
                )
            raise EnvError(f"the OpenEnv server says {error.get('code')}: {error.get('message')}")
        answer: dict[str, Any] = told["data"]
        return answer

    async def step(self, action: str) -> Step:
        if self._over:
            return Step(observation="the episode is over", terminated=True)
        call = json.loads(action)
        data = call["arguments"]
        if self._taskset.calls_tools:
            data = {"type": "call_tool", "tool_name": call["name"], "arguments": call["arguments"]}
        try:
            told = await self._ask("step", data)
        except _Refused as error:
            return Step(observation=f"invalid action: {error}")
        reward = reward_of(told)
        self._total, self._steps, self._over = self._total + reward, self._steps + 1, bool(told.get("done"))
        return Step(observation=self._shown(told["observation"]), reward=reward, terminated=self._over)

    def _shown(self, observation: dict[str, Any]) -> str:
        if self._taskset.config.field:
            return str(observation.get(self._taskset.config.field, ""))
        if "tool_name" in observation:
            return _tool_text(observation)
        told = {
            k: v
            for k, v in observation.items()
            if k not in ("metadata", "done", "reward") and v not in (None, "", [], {})
        }
        texts = [value for value in told.values() if isinstance(value, str)]
        return texts[0] if len(told) == len(texts) == 1 else json.dumps(told, ensure_ascii=False)

    async def score(self, transcript: Transcript) -> Score:
        return Score(reward=self._total, parts={"steps": float(self._steps)})

    async def close(self) -> None:
        await self._hang_up()
        if self._http is not None:
            await self._http.close()

    async def _hang_up(self) -> None:
        """Say goodbye: the slot is free at once."""
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await link.send_json({"type": "close"})
            await link.close()
        if self._reading is not None:
            self._reading.cancel()


class _NoSlot(Exception):
    """Every slot is taken."""


class _Refused(Exception):
    """The action has the wrong shape: the policy's to mend."""


class _Server:
    """uvicorn over an environment's folder, in its own Python."""

    def __init__(self, worker: WorkerConfig, config: OpenEnvConfig) -> None:
        assert config.folder is not None
        self._folder, self.log = scratch_folder("openenv"), worker.log
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket() as bound, self.log.open("ab") as sink:
            bound.bind(("127.0.0.1", 0))
            bound.set_inheritable(True)
            self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            command = [worker.python, "-m", "uvicorn", "--fd", str(bound.fileno()), "--app-dir", config.folder]
            # Its clients read all the time; nothing is gained by dropping one whose machine is busy.
            command += ["--ws-ping-timeout", "3600", "--log-level", "warning", config.app or _app(config.folder)]
            self._process = launched(
                list(map(str, command)),
                sink=sink,
                folder=self._folder,
                environment=quiet_environment(worker.secrets, worker.environment),
                pass_fds=(bound.fileno(),),
            )
        self._wait(worker.start_s)

    def _wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            if self.ended:
                self.close()
                raise EnvError(f"the OpenEnv server ended at its start; {self.log} ends with:\n{end_of(self.log)}")
            with contextlib.suppress(EnvError):
                _get(f"{self.url}/health", limit_s=2.0)
                return
            if time.monotonic() > deadline:
                self.close()
                raise EnvError(f"the OpenEnv server did not answer within {limit_s:g} s; see {self.log}")
            time.sleep(0.05)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Let it end, then make it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3.0)
        end_with_children(self._process, self._folder)


def _app(folder: Path) -> str:
    """`app` of openenv.yaml: one line, so that no YAML library is needed."""
    described = folder / "openenv.yaml"
    for line in described.read_text().splitlines() if described.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "app":
            return value.strip().strip("\"'")
    return "server.app:app"


def _tool(told: dict[str, Any]) -> ToolSpec:
    parameters = told.get("input_schema") or told.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": told["name"], "description": told.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_text(observation: dict[str, Any]) -> str:
    """What a tool answered."""
    if observation.get("error"):
        return f"error: {observation['error'].get('message')}"
    result = observation.get("result")
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return result if isinstance(result, str) else json.dumps(result)


def _get(url: str, body: dict[str, Any] | None = None, limit_s: float = _ANSWER_S) -> Any:
    """JSON from the server; EnvError otherwise."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as reply:
            return json.load(reply)
    except (OSError, ValueError) as error:
        raise EnvError(f"{url}: {error}") from error

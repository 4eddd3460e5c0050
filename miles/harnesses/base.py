"""The agent layer: a program drives the model through the session's endpoint."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from miles.errors import ConfigError, EnvError, HarnessError, SandboxError
from miles.sandboxes.base import Sandbox
from miles.types import Env, Observation, Task, ToolSpec

__all__ = [
    "LIMITS",
    "AgentContext",
    "Endpoint",
    "EnvTools",
    "FunctionHarness",
    "Harness",
    "Progress",
    "SessionNeeds",
    "as_harness",
]


LIMITS = ("turn_limit", "token_limit", "context_length_exceeded")
"""Refusals of the session that are an episode's own bounds; any other is a bad request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the model is: an OpenAI base URL, the session's key, any model name.

    `context` is the most tokens of prompt and answer of one call, `max_tokens` of an answer; 0: not told.
    """

    base_url: str
    api_key: str
    model: str = "policy"
    context: int = 0
    max_tokens: int = 0

    @property
    def root_url(self) -> str:
        """The base URL of Anthropic's clients: without `/v1`."""
        return self.base_url.removesuffix("/v1")

    @property
    def mcp_url(self) -> str:
        """The environment's tools, over MCP's streamable HTTP, with the same key."""
        return f"{self.root_url}/mcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the session's records say about the agent."""

    turns: int = 0
    refusal: str = ""
    """Why its last request was refused; empty when it was answered."""
    open_calls: bool = False
    """Whether the newest answer of the main line calls tools whose results never came."""


class EnvTools:
    """The environment's tools, one call at a time, for a loop of ours or for MCP."""

    def __init__(self, env: Env | None, tools: Sequence[ToolSpec]) -> None:
        self.tools = tuple(tools)
        self.over = False
        self.failure: EnvError | SandboxError | None = None
        """What went wrong in the environment itself; the episode is not the policy's any more."""
        self._env, self._turn, self._closed = env, asyncio.Lock(), False
        self._stepping: asyncio.Task[Any] | None = None

    @property
    def names(self) -> list[str]:
        return [str(tool["function"]["name"]) for tool in self.tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the environment answers; `over` is true after its last step. KeyError for a name that is no tool."""
        if self._env is None or name not in self.names:
            raise KeyError(name)
        async with self._turn:
            if self._closed:
                return "The agent's time is over: no action changes anything any more."
            if self.over:
                return "The episode is over: no action changes it any more."
            action = str(arguments.get("action", ""))
            named = json.dumps({"name": name, "arguments": arguments})
            try:
                self._stepping = asyncio.current_task()
                step = await self._env.step(action if name == "act" else named)
            except (EnvError, SandboxError) as error:
                self.failure = error
                raise
            finally:
                self._stepping = None
            self.over = step.terminated or step.truncated
            return step.observation

    async def close(self, limit_s: float) -> None:
        """Take no more calls, and wait for the one that is being answered: an agent may have ended before its step has.
        TimeoutError."""
        self._closed = True
        try:
            async with asyncio.timeout(limit_s), self._turn:
                return
        except TimeoutError:
            if self._stepping is not None:
                self._stepping.cancel()  # it must not outlive its environment
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """All that an agent gets. `deadline` is on the clock of `time.monotonic`; `log` is bounded."""

    task: Task
    env: Env
    observation: Observation
    sandbox: Sandbox | None
    endpoint: Endpoint
    deadline: float
    log: Callable[[str], None]
    tools: EnvTools
    progress: Callable[[], Progress] = Progress

    async def endpoint_inside(self) -> Endpoint:
        """The model as programs in the sandbox reach it, also where there is no network: a port of theirs that leads to
        the session's server and nowhere else. SandboxError where the sandbox has no way out."""
        if self.sandbox is None:
            raise HarnessError("this task has no sandbox to run a program in")
        parts = urlsplit(self.endpoint.base_url)
        port = await self.sandbox.reach(lambda: asyncio.open_connection(parts.hostname, parts.port))
        return replace(self.endpoint, base_url=parts._replace(netloc=f"127.0.0.1:{port}").geturl())


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNeeds:
    """What a harness wants of its session; None: what the recipe says."""

    canonicalisers: tuple[str, ...] = ()
    report_truncation: bool | None = None
    wishes: Literal["refuse", "record"] | None = None


class Harness(Protocol):
    """A program around the model. Returns when the agent is done; what it raises is the agent's fault.

    It may also have `needs: SessionNeeds`, `prepare()` (called once, before the first episode) and
    `machine(spec, capabilities)`: the sandbox that it wants instead of the task's.
    """

    async def run(self, context: AgentContext) -> None: ...
    async def close(self) -> None: ...


class FunctionHarness:
    """An async function as a harness."""

    def __init__(self, function: Callable[[AgentContext], Awaitable[None]]) -> None:
        self._function = function

    async def run(self, context: AgentContext) -> None:
        await self._function(context)

    async def close(self) -> None:
        return None


def as_harness(plugin: Any, **settings: Any) -> Harness:
    """A harness from a class, an instance, or an `async def run(context)`."""
    if isinstance(plugin, type):
        harness: Harness = plugin(**settings)
        return harness
    if hasattr(plugin, "run"):
        return plugin  # type: ignore[no-any-return]
    if callable(plugin):
        return FunctionHarness(plugin)
    raise ConfigError(f"{plugin!r} is no harness: give a class with run(context), or an async function")

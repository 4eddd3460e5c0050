"""The agent layer: a program drives the model through the session's endpoint."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from miles.errors import ConfigError, HarnessError
from miles.sandboxes.base import Sandbox
from miles.types import Env, Observation, Task

__all__ = ["AgentContext", "Endpoint", "FunctionHarness", "Harness", "as_harness"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the model is: an OpenAI base URL, the session's key, any model name."""

    base_url: str
    api_key: str
    model: str = "policy"


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

    async def endpoint_inside(self) -> Endpoint:
        """The model as programs in the sandbox reach it, also where there is no network: a port of theirs that leads to
        the session's server and nowhere else. SandboxError where the sandbox has no way out."""
        if self.sandbox is None:
            raise HarnessError("this task has no sandbox to run a program in")
        parts = urlsplit(self.endpoint.base_url)
        port = await self.sandbox.reach(lambda: asyncio.open_connection(parts.hostname, parts.port))
        return replace(self.endpoint, base_url=parts._replace(netloc=f"127.0.0.1:{port}").geturl())


class Harness(Protocol):
    """A program around the model. Returns when the agent is done; what it raises is the agent's fault."""

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

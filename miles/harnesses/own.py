"""`own`: the environment's own agent plays, against the session's endpoint. For environments that bring one."""

import time

from miles.errors import ConfigError
from miles.harnesses.base import AgentContext

__all__ = ["OwnHarness"]


class OwnHarness:
    """Hands the endpoint to the environment and waits for its loop to end."""

    async def run(self, context: AgentContext) -> None:
        run = getattr(context.env, "run", None)
        if run is None:
            raise ConfigError(
                "this environment brings no agent of its own: choose another harness, as harness.name=react"
            )
        endpoint = context.endpoint
        told = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
        await run(told, max(1.0, context.deadline - time.monotonic()), context.log)

    async def close(self) -> None:
        return None

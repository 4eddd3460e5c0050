"""`react`: our white-box tool loop over chat completions. Tools: the env's own, and a shell in the sandbox."""

import asyncio
import json
import time
from typing import Any

from pydantic import Field

from miles.config import Config
from miles.errors import EngineError, HarnessError
from miles.harnesses.base import LIMITS, AgentContext
from miles.http import Http, Reply, Unreachable
from miles.sandboxes.shell import SHELL_TOOL, run_shell
from miles.types import Message, ToolSpec

__all__ = ["ReactConfig", "ReactHarness"]

_RETRY_S = (0.5, 1.0, 2.0, 4.0)


class ReactConfig(Config):
    """Bounds of the tool loop."""

    max_turns: int = Field(16, gt=0)
    """Model calls after which the agent stops."""
    command_timeout_s: float = Field(30.0, gt=0)
    """Deadline of one shell command."""
    max_output: int = Field(8192, gt=0)
    """Bytes of one command's output that the model sees (head and tail)."""


class ReactHarness:
    """Ask, run the tools that were called, tell the results, until the model calls none."""

    config_class = ReactConfig

    def __init__(self, config: ReactConfig | None = None) -> None:
        self.config = config or ReactConfig()
        self._http = Http(kept_s=60.0)

    async def run(self, context: AgentContext) -> None:
        tools = [*context.observation.tools, *([SHELL_TOOL] if context.sandbox is not None else [])]
        messages = list(context.observation.messages)
        for _ in range(self.config.max_turns):
            answer = await self._ask(context, messages, tools)
            messages.append({name: value for name, value in answer.items() if value is not None})
            calls = answer.get("tool_calls") or ()
            for call in calls:
                text, over = await self._use(context, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                if over:
                    return
            if not calls:
                return

    async def close(self) -> None:
        await self._http.close()

    async def _ask(self, context: AgentContext, messages: list[Message], tools: list[ToolSpec]) -> Message:
        """The model's message. HarnessError for what the session refuses, EngineError for what no retry mended."""
        body = {"model": context.endpoint.model, "messages": messages, **({"tools": tools} if tools else {})}
        for pause_s in (*_RETRY_S, None):
            try:
                reply = await self._post(context, body)
            except Unreachable as error:
                failed = str(error)
            else:
                if reply.status == 200:
                    message: Message = reply.json()["choices"][0]["message"]
                    return message
                failed = f"{reply.status} {reply.text[:500]}"
                if reply.status not in (408, 409, 429) and reply.status < 500:
                    break
            if pause_s is None or time.monotonic() + pause_s > context.deadline:
                break
            await asyncio.sleep(pause_s)
        if failed[:1] == "4":
            reason = _code(reply)
            raise HarnessError(failed, reason=reason if reason in LIMITS else "bad_request")
        raise EngineError(f"the model endpoint failed: {failed}")  # no answer, or a 5xx: not the policy's doing

    async def _post(self, context: AgentContext, body: dict[str, Any]) -> Reply:
        """One pool of connections for all episodes. (OpenAI's SDK would take half of the driver's time.)"""
        return await self._http.post(
            f"{context.endpoint.base_url}/chat/completions",
            body,
            headers={"Authorization": f"Bearer {context.endpoint.api_key}"},
            limit_s=max(1.0, context.deadline - time.monotonic()),
        )

    async def _use(self, context: AgentContext, call: dict[str, Any]) -> tuple[str, bool]:
        """Run one tool call: (what the model sees, whether the episode is over)."""
        name = call["name"]
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except json.JSONDecodeError as error:
            return f"error: the arguments are not valid JSON: {error}", False
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object", False
        if name == "shell" and context.sandbox is not None:
            text = await run_shell(
                context.sandbox,
                arguments,
                timeout_s=self.config.command_timeout_s,
                max_output=self.config.max_output,
            )
            return text, False
        if name in context.tools.names:
            return await context.tools.call(name, arguments), context.tools.over
        return f"error: there is no tool {name!r}; offered: {', '.join(context.tools.names) or 'shell'}", False


def _code(reply: Reply) -> str:
    """Why the session refused, in its own word."""
    try:
        return str(reply.json()["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return ""

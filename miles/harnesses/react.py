"""`react`: our white-box tool loop over the OpenAI SDK. Tools: the env's own, and a shell in the sandbox."""

import json
import time
from typing import TYPE_CHECKING, Any

from pydantic import Field

from miles.config import Config
from miles.errors import EngineError, HarnessError
from miles.harnesses.base import AgentContext
from miles.sandboxes.shell import SHELL_TOOL, run_shell
from miles.types import Message, ToolSpec

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessage

__all__ = ["ReactConfig", "ReactHarness"]

_LIMITS = ("turn_limit", "token_limit", "context_length_exceeded")


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
        self._shared: AsyncOpenAI | None = None

    async def run(self, context: AgentContext) -> None:
        client = self._client(context)
        tools = [*context.observation.tools, *([SHELL_TOOL] if context.sandbox is not None else [])]
        messages = list(context.observation.messages)
        for _ in range(self.config.max_turns):
            answer = await self._ask(client, context, messages, tools)
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                return
            for call in answer.tool_calls:
                text, over = await self._use(context, call)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
                if over:
                    return

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()
            self._shared = None

    def _client(self, context: AgentContext) -> "AsyncOpenAI":
        """One connection pool for all episodes; a client object per episode."""
        from openai import AsyncOpenAI

        if self._shared is None:
            self._shared = AsyncOpenAI(api_key="none", base_url=context.endpoint.base_url, max_retries=4)
        return self._shared.with_options(
            api_key=context.endpoint.api_key,
            base_url=context.endpoint.base_url,
            timeout=max(1.0, context.deadline - time.monotonic()),
        )

    async def _ask(
        self, client: "AsyncOpenAI", context: AgentContext, messages: list[Message], tools: list[ToolSpec]
    ) -> "ChatCompletionMessage":
        import openai

        options: dict[str, Any] = {"tools": tools} if tools else {}
        try:
            reply = await client.chat.completions.create(
                model=context.endpoint.model,
                messages=messages,  # type: ignore[arg-type]
                **options,
            )
        except (openai.BadRequestError, openai.RateLimitError) as error:
            reason = str(error.code)
            raise HarnessError(str(error), reason=reason if reason in _LIMITS else "bad_request") from error
        except openai.OpenAIError as error:  # no answer, or a 5xx: not the policy's doing
            raise EngineError(f"the model endpoint failed: {error}") from error
        return reply.choices[0].message

    async def _use(self, context: AgentContext, call: Any) -> tuple[str, bool]:
        """Run one tool call: (what the model sees, whether the episode is over)."""
        name = call.function.name
        try:
            arguments = json.loads(call.function.arguments or "{}")
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
        offered = [tool["function"]["name"] for tool in context.observation.tools]
        if name in offered:
            named = json.dumps({"name": name, "arguments": arguments})
            step = await context.env.step(str(arguments.get("action", "")) if name == "act" else named)
            return step.observation, step.terminated or step.truncated
        return f"error: there is no tool {name!r}; offered: {', '.join(offered) or 'shell'}", False

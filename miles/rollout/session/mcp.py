"""The environment's tools over MCP, at the session's own address (`/s/{id}/mcp`) and with its key.

Streamable HTTP, stateless: every call stands alone, so a harness may connect as often as it likes. One server for all
sessions; a request says which one it is for.
"""

import asyncio
import contextlib
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from miles import __version__
from miles.errors import EnvError, SandboxError
from miles.harnesses.base import EnvTools

__all__ = ["McpServer"]

_TOOLS = "miles.tools"  # where a request's scope holds the tools of its session
Context = ServerRequestContext[Any]


class McpServer:
    """The running server. A task of its own holds it, since requests come and go."""

    def __init__(self) -> None:
        self._server = Server("env", version=__version__, on_list_tools=_listed, on_call_tool=_called)
        self._manager = StreamableHTTPSessionManager(self._server, json_response=True, stateless=True)
        self._running, self._stop = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._manager.run():
            self._running.set()
            await self._stop.wait()

    async def answer(self, tools: EnvTools, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request with these tools."""
        await self._running.wait()
        await self._manager.handle_request({**scope, _TOOLS: tools}, receive, send)

    async def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def _tools(context: Context) -> EnvTools:
    assert isinstance(context.request, Request)
    tools: EnvTools = context.request.scope[_TOOLS]
    return tools


async def _listed(context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    told = [tool["function"] for tool in _tools(context).tools]
    empty = {"type": "object", "properties": {}}
    return types.ListToolsResult(
        tools=[
            types.Tool(
                name=tool["name"],
                description=tool.get("description", ""),
                input_schema=tool.get("parameters") or empty,
            )
            for tool in told
        ]
    )


async def _called(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
    tools = _tools(context)
    try:
        text = await tools.call(params.name, params.arguments or {})
    except KeyError:
        text = f"there is no tool {params.name!r}; offered: {', '.join(tools.names)}"
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
    except (EnvError, SandboxError):  # the episode is discarded; the agent need not know why
        text = "the environment failed; the episode ends here"
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
    text = text.encode("utf-8", "replace").decode()  # halves of surrogate pairs cannot be sent
    over = "\n[The episode is over.]" if tools.over and "episode is over" not in text else ""
    return types.CallToolResult(content=[types.TextContent(text=text + over)])

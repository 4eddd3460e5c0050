"""Prime verifiers 0.4: a package with a Taskset (and perhaps an Env).

Settings: id, test (the config of held-out tasks), and the taskset's own.

Its episodes run in this process: the agent is a plain chat loop, task-scoped tools are called without a process of
their own, and every trace's model calls go to its own endpoint. The last two use what 0.4 does not promise, so the
version is bounded where it is installed."""

import asyncio
import contextlib
import json
import logging
import sys
import types

import httpx
import verifiers.v1 as vf
import verifiers.v1.interception.server as interception
import verifiers.v1.rollout as rollout
from miles_worker.protocol import Failure
from openai import APIError, APIStatusError, AsyncOpenAI
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp, mcp_content_to_chat_content
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    load_taskset,
    resolve_env_config,
    taskset_config_type,
)

_ROUTED = "http://routed/v1"  # stands for each trace's own endpoint
_ENDPOINTS = {}  # trace id -> endpoint
_TRACES = {}  # trace id -> trace
_SERVERS = {}  # "inprocess:…" -> MCP server
_HARNESS = "miles_plain_loop"
_TEST_NAMES = ("test", "eval", "validation")
_MOST = 4096  # tasks of an endless taskset


class PlainConfig(vf.HarnessConfig):
    """Nothing to set."""


class PlainLoop(vf.Harness[PlainConfig]):
    """Ask, call the tools that were asked for, tell, until none is asked for."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    http = None

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if PlainLoop.http is None:
            limits = httpx.Limits(max_connections=None)
            PlainLoop.http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10), limits=limits, trust_env=False)
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=2, http_client=PlainLoop.http)
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with contextlib.AsyncExitStack() as stack:
            tools, call = await _tools(mcp_urls, stack, self.config.tool_timeout)
            offered = {"tools": tools} if tools else {}
            while True:
                try:
                    done = await client.chat.completions.create(model=ctx.model, messages=messages, **offered)
                except APIStatusError as error:
                    if is_context_overflow(error):
                        trace.info["context_overflow"] = True
                        break
                    return ProgramResult(exit_code=1, stdout="", stderr=f"{type(error).__name__}: {error}")
                except APIError as error:
                    return ProgramResult(exit_code=1, stdout="", stderr=f"{type(error).__name__}: {error}")
                answer = done.choices[0].message
                messages.append(answer.model_dump(exclude_none=True))
                if not answer.tool_calls:
                    break
                for asked in answer.tool_calls:
                    content = await call(asked.function.name, asked.function.arguments)
                    told = {"role": "tool", "tool_call_id": asked.id, "name": asked.function.name, "content": content}
                    messages.append(told)
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _tools(urls, stack, timeout_s):
    """Chat tools of MCP servers, here and elsewhere, and one function that calls any of them."""
    from mcp import Client

    tools, calls = [], {}
    for name, url in urls.items():
        if url in _SERVERS:
            client = await stack.enter_async_context(Client(_SERVERS[url]))
            for tool in (await client.list_tools()).tools:
                full = f"{name}_{tool.name}" if name else tool.name
                function = {"name": full, "description": tool.description or "", "parameters": tool.input_schema}
                tools.append({"type": "function", "function": function})
                calls[full] = (client, tool.name)
    elsewhere = {name: {"url": url, "timeout": timeout_s} for name, url in urls.items() if url not in _SERVERS}
    dispatch, servers = {}, {}
    if elsewhere:
        more, dispatch, servers = await asyncio.wait_for(connect_mcp({"mcpServers": elsewhere}, stack), 60)
        tools = [*tools, *more]

    async def call(name, text):
        try:
            arguments = json.loads(text or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("they must be a JSON object")
        except ValueError as error:
            return f"error: invalid arguments: {error}"
        if name in calls:
            client, own = calls[name]
            return mcp_content_to_chat_content((await client.call_tool(own, arguments)).content)
        if name in dispatch:
            return await call_mcp(servers, dispatch, name, arguments)
        return f"error: there is no tool {name!r}"

    return tools, call


class _Routed(EvalClient):
    """One client for all; the trace says where a call goes."""

    def _at(self, session):
        client = EvalClient.__new__(EvalClient)
        client.__dict__.update(self.__dict__)
        endpoint = _ENDPOINTS[session]
        client.base_url, client.api_key = endpoint["base_url"], endpoint["api_key"]
        return client

    async def get_response(self, dialect, body, sampling, session_id=None, turn=None, headers=None):
        return await self._at(session_id).get_response(dialect, body, sampling, session_id, turn, headers)

    async def relay(self, dialect, body, session_id=None, headers=None):
        return await self._at(session_id).relay(dialect, body, session_id, headers)


def _install():
    """Put the loop, the routing and the tools in their places."""
    module = types.ModuleType(_HARNESS)
    module.PlainLoop, module.__all__ = PlainLoop, ["PlainLoop"]
    sys.modules[_HARNESS] = module  # harnesses are found by module name
    usual = interception.resolve_client
    interception.resolve_client = lambda config: _Routed(config) if config.base_url == _ROUTED else usual(config)
    serve = rollout.serve_tools

    @contextlib.asynccontextmanager
    async def serve_here(toolsets, runtime, shared=None, *, state_secret="", state_route="", state_base=None):
        from mcp.server.mcpserver import MCPServer

        trace = _TRACES.get(state_route)
        plain = runtime.type == "subprocess" and trace is not None
        here = [t for t in toolsets if plain and not t.config.url and t.config.runtime.type == "subprocess"]
        rest = [t for t in toolsets if t not in here]
        told = {"state_secret": state_secret, "state_route": state_route, "state_base": state_base}
        async with contextlib.AsyncExitStack() as stack:
            urls = dict(await stack.enter_async_context(serve(rest, runtime, shared, **told)))
            for toolset in here:
                _share_state(toolset, trace)
                await stack.enter_async_context(toolset._exit_stack)
                await toolset.setup()
                await toolset.setup_task(trace.task.data)
                server = MCPServer(toolset.server_name or type(toolset).__name__)
                toolset.register(server)
                url = f"inprocess:{state_route}:{toolset.server_name}"
                _SERVERS[url] = server
                stack.callback(_SERVERS.pop, url, None)
                urls[toolset.server_name] = url
            yield urls

    rollout.serve_tools = serve_here


def _share_state(toolset, trace):
    """The tools read and write the live state: there is nothing to fetch or send back."""

    async def pull():
        return trace.state

    async def push(before):
        return None

    toolset._inert_state, toolset._pull_state, toolset._push_state = trace.state, pull, push


def make(settings):
    logging.basicConfig(level=logging.WARNING)  # before an MCP server puts its own handler there
    _install()
    try:
        return Tasksets(**settings)
    except (ImportError, ValueError, TypeError) as error:
        raise Failure(f"verifiers cannot load it: {type(error).__name__}: {error}", "task") from error


class Tasksets:
    """The environment of one package."""

    def __init__(self, id, test=None, env="", most=_MOST, max_turns=None, **config):
        raw = {"id": env, "taskset": {**config, "id": id}}
        self.id = id
        for name, field in env_config_type(id, env).model_fields.items():
            if isinstance(field.default, AgentConfig):
                raw[name] = {"runtime": {"type": "subprocess"}, **({"max_turns": max_turns} if max_turns else {})}
                if field.default.harness is None and default_harness_id(id) == "bash":  # what stands for "any"
                    raw[name]["harness"] = {"id": _HARNESS}
        self.env = load_environment(resolve_env_config(raw))
        self.serving = None
        held_out = test if test is not None else _held_out(taskset_config_type(id))
        self.rows = {"train": self._listed(self.env.taskset, most)}
        if held_out:
            chosen = taskset_config_type(id).model_validate({**config, **held_out, "id": id})
            self.rows["test"] = self._listed(load_taskset(chosen), most)

    @staticmethod
    def _listed(taskset, most):
        return list(taskset if taskset.bounded else taskset.take(most))

    def about(self):
        splits = {split: len(rows) for split, rows in self.rows.items()}
        return {"name": self.id, "layer": "agent", "splits": splits, "versions": {"verifiers": "v1"}}

    def tasks(self, split, start, stop):
        rows = self.rows[split][start:stop]
        return [
            {"id": f"{split}/{start + n}", "prompt": _prompt(row), "data": {"split": split, "index": start + n}}
            for n, row in enumerate(rows)
        ]

    def gold(self, task):
        answer = getattr(self.rows[task["split"]][task["index"]].data, "answer", None)
        return {"answer": str(answer)} if answer not in (None, "") else None

    async def play(self, task, seed, host):
        if self.serving is None:  # once for all episodes; ends with the worker
            self.serving = asyncio.ensure_future(self.env.serving().__aenter__())
        await self.serving
        return Play(self.env, self.rows[task["split"]][task["index"]])


class Play:
    """One episode of one task."""

    def __init__(self, env, task):
        self.env, self.task, self.trace = env, task, None

    async def reset(self):
        return {"messages": _prompt(self.task)}

    async def run(self, endpoint, timeout_s):
        traces = []

        def begun(trace):
            traces.append(trace)
            _ENDPOINTS[trace.id], _TRACES[trace.id] = endpoint, trace

        client = vf.EvalClientConfig(base_url=_ROUTED, api_key_var="MILES_UNUSED")
        context = vf.ModelContext(model=endpoint["model"], client=client)
        try:
            done = await asyncio.wait_for(self.env.run_episode(self.task, context, on_trace=begun), timeout_s)
        except TimeoutError:
            raise Failure(f"its loop took longer than {timeout_s:g} s", "policy", "agent_timeout") from None
        finally:
            for trace in traces:
                _ENDPOINTS.pop(trace.id, None)
                _TRACES.pop(trace.id, None)
        errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
        if errors and not done.ok:
            kind = "engine" if errors[-1].type in ("ProviderError", "InterceptionError") else "env"
            raise Failure(f"{errors[-1].type}: {errors[-1].message}", kind)
        found = [trace for trace in done.traces if trace.agent.trainable] or done.traces
        if not found:
            raise Failure("the episode left no trace")
        if found[0].info.get("context_overflow"):
            raise Failure("the conversation outgrew the context", "policy", "context_length_exceeded")
        self.trace = found[0]

    async def score(self, transcript):
        if self.trace is None:
            raise Failure("its own loop must run before it can score")
        parts = {name: reward.score for name, reward in self.trace.rewards.items() if reward is not None}
        parts.update({name: value for name, value in self.trace.metrics.items() if value is not None})
        return {"reward": self.trace.reward, "parts": parts}


def _held_out(config):
    """What makes a taskset's config that of its held-out tasks: a field `split` that knows such a word."""
    if "split" not in config.model_fields:
        return None
    values = getattr(config.model_fields["split"].annotation, "__args__", ())
    return next(({"split": name} for name in _TEST_NAMES if name in values), None)


def _prompt(task):
    data = task.data
    prompt = getattr(data, "prompt", None)
    system = [{"role": "system", "content": data.system_prompt}] if getattr(data, "system_prompt", None) else []
    if prompt is None:
        return system
    if isinstance(prompt, str):
        return [*system, {"role": "user", "content": prompt}]
    return [*system, *(message_to_wire(message) for message in prompt)]

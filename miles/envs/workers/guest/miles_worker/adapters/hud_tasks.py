"""HUD: tasks of a file or folder, played over the wire of one server that they all share. Settings: target, layer.

At the env layer our harness answers: the prompt comes from `tasks.start`, MCP tools are called here, the answer is
graded by `tasks.grade`. At the agent layer HUD's own chat agent does."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
from urllib.parse import urlsplit

# Without a key nothing is sent; "false" would write every span to the home folder.
os.environ.update(
    HUD_API_KEY="",
    HUD_TELEMETRY_LOCAL_DIR="",
    HUD_TELEMETRY_ENABLED="true",
    HUD_CLI_ANALYTICS_ENABLED="false",
    HUD_FILE_TRACKING_ENABLED="false",
    FASTMCP_CHECK_FOR_UPDATES="off",
)

from hud.eval import LocalRuntime, Runtime, Taskset
from miles_worker.protocol import Failure

_LIMIT = 16 << 20
_TASK_FILES = ("tasks.py", "tasks.jsonl", "tasks.json")


def make(settings):
    return Hud(**settings)


class Hud:
    """Rows are tasks; a column `split` tells train from test."""

    def __init__(self, target, layer="env", env="", url="", split_column="split"):
        self.layer, self.server, self.starting, self.url = layer, None, None, url
        self.rows = {}
        if target.startswith("tcp://"):
            self.url, self.env_file = target, ""
            self.rows["train"] = _templates(target)
            return
        folder = target if os.path.isdir(target) else os.path.dirname(target)
        places = [target] if os.path.isfile(target) else [os.path.join(target, name) for name in _TASK_FILES]
        tasks = next((place for place in places if os.path.isfile(place)), target)
        self.env_file = env or os.path.join(folder, "env.py")
        for row in Taskset.from_file(tasks).tasks.values():
            split = (getattr(row, "columns", None) or {}).get(split_column, "train")
            self.rows.setdefault(split, []).append(row)

    def about(self):
        return {
            "name": os.path.basename(os.path.dirname(self.env_file)) or self.url,
            "layer": self.layer,
            "splits": {split: len(rows) for split, rows in self.rows.items()},
        }

    def tasks(self, split, start, stop):
        rows = self.rows[split][start:stop]
        return [
            {"id": f"{split}/{row.slug or start + n}", "data": {"split": split, "index": start + n}}
            for n, row in enumerate(rows)
        ]

    def gold(self, task):
        return None

    async def play(self, task, seed, host):
        if self.starting is None:
            self.starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self.starting)
        row = self.rows[task["split"]][task["index"]]
        return OwnAgent(self.url, row) if self.layer == "agent" else Wire(self.url, row)

    async def _start(self):
        """One server for all; it ends with the worker. One that runs already is used as it is."""
        if self.url:
            return
        first = next(iter(self.rows.values()))[0]
        self.server = LocalRuntime(self.env_file)(first)
        self.url = (await self.server.__aenter__()).url


class Template:
    """A template without arguments, as a row."""

    def __init__(self, name):
        self.id, self.args, self.slug = name, {}, name


def _templates(url):
    """What a server offers that needs no arguments; rows with arguments come from a tasks file, with url=tcp://…"""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as link, link.makefile("rw") as lines:
        for number, method in enumerate(("hello", "tasks.list", "bye")):
            lines.write(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": {}}) + "\n")
            lines.flush()
            told = json.loads(lines.readline())
            if method == "tasks.list":
                listed = told["result"]["tasks"]
    return [Template(task["id"]) for task in listed if not (task.get("args") or {}).get("required")]


class Wire:
    """One control session: JSON-RPC, a line each, ids of ours."""

    def __init__(self, url, row):
        self.url, self.row = urlsplit(url), row
        self.numbers, self.stack = itertools.count(1), contextlib.AsyncExitStack()
        self.writer, self.owners, self.graded = None, {}, None

    async def reset(self):
        self.reader, self.writer = await asyncio.open_connection(self.url.hostname, self.url.port, limit=_LIMIT)
        hello = await self.call("hello")
        started = await self.call("tasks.start", id=self.row.id, args=self.row.args)
        prompt = started["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"messages": messages, "tools": await self._tools(hello.get("bindings") or ())}

    async def _tools(self, bindings):
        from fastmcp import Client

        tools = []
        for binding in bindings:
            if binding["protocol"].startswith("mcp/"):
                token = (binding.get("params") or {}).get("auth_token")
                client = await self.stack.enter_async_context(Client(binding["url"], auth=token))
                for tool in await client.list_tools():
                    self.owners[tool.name] = client
                    function = {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.inputSchema,
                    }
                    tools.append({"type": "function", "function": function})
        return tools

    async def call(self, method, **params):
        number = next(self.numbers)
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        self.writer.write(json.dumps(request).encode() + b"\n")
        await self.writer.drain()
        while True:
            line = await self.reader.readline()
            if not line:
                raise Failure(f"the HUD server closed the connection after {method}")
            told = json.loads(line)
            if told.get("id") != number:  # of a call that was given up
                continue
            if "error" in told:
                raise Failure(f"{method}: {told['error'].get('message')}")
            return told["result"]

    async def step(self, action):
        asked = json.loads(action)
        if asked["name"] not in self.owners:
            return {"observation": f"error: there is no tool {asked['name']!r}"}
        done = await self.owners[asked["name"]].call_tool_mcp(name=asked["name"], arguments=asked["arguments"])
        return {"observation": "\n".join(part.text for part in done.content if part.type == "text")}

    async def score(self, transcript):
        if self.graded is None:  # grading ends the task
            self.graded = await self.call("tasks.grade", answer=transcript["final_text"])
        if self.graded.get("isError"):
            raise Failure(f"grading failed: {self.graded.get('content')}")
        return {"reward": self.graded["score"], "parts": _subscores(self.graded.get("subscores"))}

    async def close(self):
        if self.writer is not None:
            with contextlib.suppress(Exception):  # without it the task stays parked on the server
                await asyncio.wait_for(self.call("bye"), 2)
            self.writer.close()
        await self.stack.aclose()


class OwnAgent:
    """HUD's own chat agent."""

    client = None

    def __init__(self, url, row):
        self.url, self.row, self.done = url, row, None

    async def reset(self):
        return {"messages": []}

    async def run(self, endpoint, timeout_s):
        from hud.agents import OpenAIChatAgent
        from hud.agents.types import OpenAIChatConfig
        from hud.eval.run import rollout
        from openai import AsyncOpenAI

        if OwnAgent.client is None:  # one pool; a copy knows its endpoint
            OwnAgent.client = AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none", max_retries=2)
        client = OwnAgent.client.with_options(base_url=endpoint["base_url"], api_key=endpoint["api_key"])
        agent = OpenAIChatAgent(OpenAIChatConfig(model=endpoint["model"], model_client=client, max_steps=64))
        runtime = Runtime(self.url)
        done = await rollout(self.row, agent, runtime=runtime, job_id="miles", rollout_timeout=timeout_s)
        errors = [step.error for step in done.trace.steps if step.error]
        if done.trace.status != "completed" or done.grade.is_error:
            said = str(errors[-1] if errors else done.grade.content or done.trace.status)
            model = any(word in said for word in ("APIConnectionError", "InternalServerError", "Error code: 5"))
            raise Failure(said, "engine" if model else "env")
        self.done = done.grade

    async def score(self, transcript):
        if self.done is None:
            raise Failure("its own loop must run before it can score")
        return {"reward": self.done.reward, "parts": _subscores(self.done.evaluation.get("subscores"))}


def _subscores(told):
    return {part["name"]: part["value"] for part in told or () if isinstance(part.get("value"), (int, float))}

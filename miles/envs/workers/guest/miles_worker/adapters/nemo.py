"""NVIDIA NeMo Gym: the servers of one config in this process, without Ray. Settings: name, layer, rows, max_steps,
overrides.

At the env layer our harness plays: `/seed_session`, a POST for every tool, `/verify`. At the agent layer its own agent
does: `/run`, where each rollout's model calls go to its own endpoint. The rollout is named by a header that every
internal call passes on, because the model's address is the config's, not the request's."""

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import json
import os
import re
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path

os.chdir(tempfile.mkdtemp(prefix="miles-nemo-"))  # it keeps caches in the working directory

import aiohttp
import uvicorn
from fastapi import Body
from fastapi.responses import JSONResponse
from miles_worker.protocol import Failure
from nemo_gym import PARENT_DIR
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import ServerClient, SimpleServer
from omegaconf import OmegaConf, open_dict

_HEADER = "x-miles-rollout"
_KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")
_ROLLOUT = contextvars.ContextVar("the rollout that a request belongs to", default=None)
_ROLLOUTS = {}  # its name -> Rollout


def make(settings):
    return NemoGym(**settings)


class NemoGym:
    """Rows of a JSONL file are tasks; the wheel has a few examples of each environment."""

    def __init__(self, name, layer="env", rows="", max_steps=32, overrides=None, split="example"):
        self.name, self.layer, self.max_steps = name, layer, max_steps
        self.config = _config(_find(name), overrides or {})
        self.starting = None
        self.rows = {"train": self._read(rows)} if rows else self._shipped()
        if not any(self.rows.values()):
            raise Failure(f"{name} ships no rows: say rows=FILE.jsonl", "task")

    @staticmethod
    def _read(path):
        with open(path) as lines:
            return [json.loads(line) for line in lines if line.strip()]

    def _shipped(self):
        """Rows by the type that the agent's datasets say; those that must be downloaded are left out."""
        found = {}
        for _, kind, server in _servers(self.config):
            for dataset in (server.get("datasets") or ()) if kind == "responses_api_agents" else ():
                path = next(
                    (
                        p
                        for p in (Path(PARENT_DIR) / dataset["jsonl_fpath"], Path(dataset["jsonl_fpath"]))
                        if p.is_file()
                    ),
                    None,
                )
                if path is not None:
                    found.setdefault(dataset.get("type", "train"), []).extend(self._read(path))
        return found

    def about(self):
        splits = {split: len(rows) for split, rows in self.rows.items()}
        return {"name": self.name, "layer": self.layer, "splits": splits}

    def tasks(self, split, start, stop):
        return [
            {"id": f"{split}/{start + n}", "prompt": _messages(row), "data": {"split": split, "index": start + n}}
            for n, row in enumerate(self.rows[split][start:stop])
        ]

    async def play(self, task, seed, host):
        if self.starting is None:
            self.starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self.starting)
        row = self.rows[task["split"]][task["index"]]
        return Rollout(self, row) if self.layer == "agent" else Loop(self, row)

    async def _start(self):
        """Every server of the config on a port of its own."""
        bound = []
        for name, kind, server in _servers(self.config):
            link = socket.socket()
            link.bind(("127.0.0.1", 0))
            with open_dict(server):
                server.host, server.port = "127.0.0.1", link.getsockname()[1]
                if kind == "responses_api_agents" and not server.get("max_steps"):
                    server.max_steps = self.max_steps  # else a policy that always calls a tool never ends
            bound.append((name, kind, server, link))
        client = _Client(head_server_config=ServerClient.load_head_server_config(), global_config_dict=self.config)
        self.urls, running = {}, []
        for name, kind, server, link in bound:
            made = _Model if kind == "responses_api_models" else _server_class(self.config[name][kind], kind)
            settings = made.model_fields["config"].annotation.model_validate(
                {**OmegaConf.to_container(server, resolve=True), "name": name}
            )
            one = made(config=settings, server_client=client)
            app = one.setup_webserver()
            one.setup_liveness(app)
            one.setup_exception_middleware(app)
            web = uvicorn.Server(uvicorn.Config(_Passing(app), log_level="warning", lifespan="on"))
            web.capture_signals = contextlib.nullcontext
            running.append((web, asyncio.ensure_future(web.serve(sockets=[link]))))
            self.urls.setdefault(kind, f"http://127.0.0.1:{server.port}")
        while not all(web.started for web, _ in running):
            for _, task in running:
                if task.done():
                    task.result()
                    raise Failure("a server of NeMo Gym ended at its start")
            await asyncio.sleep(0.02)
        limits = aiohttp.TCPConnector(limit=0)
        self.http = aiohttp.ClientSession(connector=limits, cookie_jar=aiohttp.DummyCookieJar())

    async def post(self, kind, path, body, cookies=None, headers=None, timeout_s=600.0):
        """(status, text, cookies) of one server."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        url = f"{self.urls[kind]}{path}"
        async with self.http.post(url, json=body, cookies=cookies, headers=headers, timeout=limit) as reply:
            told = {name: cookie.value for name, cookie in reply.cookies.items()}
            return reply.status, await reply.text(), told


class Rollout:
    """Its own agent plays."""

    def __init__(self, gym, row):
        self.gym, self.row, self.reward = gym, row, None
        self.failure = None

    async def reset(self):
        return {"messages": _messages(self.row)}

    async def run(self, endpoint, timeout_s):
        name = uuid.uuid4().hex
        self.endpoint = endpoint
        _ROLLOUTS[name] = self
        try:
            status, text, _ = await self.gym.post(
                "responses_api_agents", "/run", self.row, headers={_HEADER: name}, timeout_s=timeout_s
            )
        except TimeoutError:
            raise Failure(f"its agent took longer than {timeout_s:g} s", "policy", "agent_timeout") from None
        finally:
            _ROLLOUTS.pop(name, None)  # the next model call of a loop that goes on is refused
        if self.failure is not None:
            raise self.failure
        if status != 200:
            raise Failure(f"/run answered {status}: {text[:1000]}")
        self.reward = json.loads(text)["reward"]

    async def score(self, transcript):
        if self.reward is None:
            raise Failure("its own agent must run before it can score")
        return {"reward": self.reward}


class Loop:
    """Our harness plays against the resources server."""

    def __init__(self, gym, row):
        self.gym, self.row = gym, row
        self.cookies, self.output = {}, []

    async def reset(self):
        await self._post("/seed_session", self.row)
        tools = [_tool(tool) for tool in self.row["responses_create_params"].get("tools") or ()]
        return {"messages": _messages(self.row), "tools": tools}

    async def _post(self, path, body):
        status, text, cookies = await self.gym.post("resources_servers", path, body, self.cookies)
        self.cookies = {**self.cookies, **cookies}
        if status >= 500:
            raise Failure(f"{path} answered {status}: {text[:1000]}")
        return text

    async def step(self, action):
        asked = json.loads(action)
        call = f"call_{len(self.output)}"
        arguments = json.dumps(asked["arguments"])
        told = {"type": "function_call", "call_id": call, "name": asked["name"], "arguments": arguments}
        text = await self._post(f"/{asked['name']}", asked["arguments"])
        self.output += [told, {"type": "function_call_output", "call_id": call, "output": text}]
        return {"observation": text}

    async def score(self, transcript):
        said = {"type": "output_text", "text": transcript["final_text"], "annotations": []}
        message = {"type": "message", "id": "msg_0", "role": "assistant", "status": "completed", "content": [said]}
        response = {
            "id": "resp_0",
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "output": [*self.output, message],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self.row["responses_create_params"].get("tools") or [],
        }
        told = json.loads(await self._post("/verify", {**self.row, "response": response}))
        if "reward" not in told:
            raise Failure(f"/verify gave no reward: {str(told)[:1000]}")
        return {"reward": told["reward"]}


class _Passing:
    """Around every server: what is called below knows its rollout."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        named = dict(scope["headers"]).get(_HEADER.encode())
        token = _ROLLOUT.set(named.decode() if named else None)
        try:
            await self.app(scope, receive, send)
        finally:
            _ROLLOUT.reset(token)


class _Client(ServerClient):
    """Between the servers: the rollout's name travels along."""

    async def request(self, server_name, url_path, method, **more):
        if (rollout := _ROLLOUT.get()) is not None:
            more["headers"] = {**(more.get("headers") or {}), _HEADER: rollout}
        return await super().request(server_name=server_name, url_path=url_path, method=method, **more)


class _Model(SimpleResponsesAPIModel):
    """The model server: passes each call on to its rollout's endpoint."""

    config: BaseResponsesAPIModelConfig

    async def _forward(self, path, body):
        rollout = _ROLLOUTS.get(_ROLLOUT.get())
        if rollout is None:
            return JSONResponse({"error": "this rollout is over"}, 410)
        endpoint = rollout.endpoint
        data = {**body.model_dump(exclude_unset=True, mode="json"), "model": endpoint["model"]}
        headers = {"Authorization": f"Bearer {endpoint['api_key']}"}
        try:
            async with rollout.gym.http.post(f"{endpoint['base_url']}{path}", json=data, headers=headers) as reply:
                text = await reply.text()
        except aiohttp.ClientError as error:
            rollout.failure = Failure(f"the model endpoint failed: {error!r}", "engine")
            return JSONResponse({"error": str(error)}, 504)
        if reply.status >= 400:
            overflow = "context_length_exceeded" in text
            reason = "context_length_exceeded" if overflow else "bad_request"
            kind = "engine" if reply.status >= 500 else "policy"
            rollout.failure = Failure(f"{reply.status}: {text[:1000]}", kind, reason)
            return JSONResponse({"error": text[:1000]}, reply.status)
        return json.loads(text)

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()):
        told = await self._forward("/responses", body)
        return told if isinstance(told, JSONResponse) else NeMoGymResponse.model_validate(told)

    async def chat_completions(self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()):
        told = await self._forward("/chat/completions", body)
        return told if isinstance(told, JSONResponse) else NeMoGymChatCompletion.model_validate(told)


def _find(name):
    """The YAML of a name, as its command line looks for it, or a path."""
    plain, _, flavour = name.partition("/")
    places = [
        f"environments/{plain}/{flavour or 'config'}.yaml",
        f"resources_servers/{plain}/configs/{flavour or plain}.yaml",
        f"benchmarks/{plain}/{flavour or 'config'}.yaml",
    ]
    if name.endswith((".yaml", ".yml")):
        places = [name]
    found = next((path for place in places if (path := Path(PARENT_DIR) / place).is_file()), None)
    if found is None:
        raise Failure(f"NeMo Gym has no environment {name}: none of {', '.join(places)}", "task")
    return found


def _config(path, overrides):
    told = OmegaConf.load(path)
    blocks = [
        block["responses_api_agents"]
        for block in told.values()
        if OmegaConf.is_dict(block) and "responses_api_agents" in block
    ]
    models = {
        agent["model_server"]["name"] for block in blocks for agent in block.values() if agent.get("model_server")
    }
    ours = {
        name: {"responses_api_models": {"routed": {"entrypoint": "app.py"}}}
        for name in models or {"policy_model"}
        if name not in told
    }
    initial = {
        "config_paths": [str(path)],
        "policy_base_url": "",
        "policy_api_key": "",
        "policy_model_name": "policy",
        **ours,
    }
    return get_global_config_dict(
        GlobalConfigDictParserConfig(
            skip_load_from_cli=True,
            skip_load_from_dotenv=True,
            initial_global_config_dict=OmegaConf.merge(initial, overrides),
        )
    )


def _servers(config):
    for name, block in config.items():
        kind = next((kind for kind in _KINDS if OmegaConf.is_dict(block) and kind in block), None)
        if kind is not None:
            yield name, kind, next(iter(block[kind].values()))


def _server_class(block, kind):
    """The class that a server's app.py would run."""
    if str(PARENT_DIR) not in sys.path:
        sys.path.append(str(PARENT_DIR))
    folder, server = next(iter(block.items()))
    dotted = Path(server["entrypoint"]).with_suffix("").as_posix().replace("/", ".")
    try:
        module = importlib.import_module(f"{kind}.{folder}.{dotted}")
    except ModuleNotFoundError as error:
        raise Failure(f"{folder} needs the package {error.name}: add it with --with {error.name}", "task") from error
    named = re.findall(r"(\w+)\.run_webserver\(\)", inspect.getsource(module))
    if named:
        return getattr(module, named[-1])
    own = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, SimpleServer)]
    return [c for c in own if c.__module__ == module.__name__][-1]


def _messages(row):
    """Responses items as chat messages; only texts are taken."""
    asked = row["responses_create_params"]["input"]
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    messages = []
    for item in asked:
        content = item.get("content")
        if isinstance(content, list):
            content = "\n".join(part.get("text", "") for part in content)
        if item.get("role") and content is not None:
            messages.append({"role": "system" if item["role"] == "developer" else item["role"], "content": content})
    return messages


def _tool(tool):
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}

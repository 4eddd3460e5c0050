"""A small SGLang server: the wire of 0.5.17 (or of a newer one) around a real tiny model, on a port of its own.

It samples token by token, so that aborts, pauses and updates meet requests in mid-flight. `cached_tokens` counts the
longest prefix that was read before under the same extra_key. Routing is recorded for mixtures of experts. What it
cannot show: how kernels round, and how a real server dies.
"""

import asyncio
import base64
import contextlib
import json
import pickle
import socket
from pathlib import Path

import numpy as np
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from miles.models import load_model
from miles.trainer.model.replay import RoutingReplay


class Emulator:
    """Use `async with emulated(model) as server`. `asked` and `calls` keep what was asked of it."""

    def __init__(
        self, model: Path, *, newer: bool = False, copies: int = 1, tokens: int = 20_000, delay_s: float = 0.0
    ):
        self.directory, self.newer, self.copies, self.tokens, self.delay_s = model, newer, copies, tokens, delay_s
        self.model = load_model(model)
        self.replay = RoutingReplay(self.model)
        self.version, self.url, self.port = "default", "", 0
        self.asked, self.calls, self.aborted, self.adapters = [], [], set(), []
        self.running = asyncio.Event()
        self.running.set()
        self.seen: set[tuple] = set()
        self.in_flight = self.sampled = 0
        self.silent = ""  # what is never answered
        self.dice = torch.Generator().manual_seed(0)
        names = ["pause_generation", "continue_generation", "abort_request", "update_weights_from_disk", "flush_cache"]
        names += ["update_weights_from_tensor", "load_lora_adapter", "unload_lora_adapter", "update_weight_version"]
        names += ["init_weights_update_group", "update_weights_from_distributed"]
        names += ["begin_weight_update", "end_weight_update"] if newer else []
        self.app = Starlette(
            routes=[
                Route("/server_info", self.server_info),
                Route("/model_info", lambda r: JSONResponse({"weight_version": self.version})),
                Route("/v1/models", lambda r: JSONResponse({"data": [{"max_model_len": 2000}]})),
                Route("/generate", self.generate, methods=["POST"]),
                *(Route(f"/{name}", self.call, methods=["POST"]) for name in names),
                *([Route("/ready", lambda r: JSONResponse({}))] if newer else []),
            ]
        )

    async def server_info(self, request):
        return JSONResponse(
            {
                "version": "0.5.23" if self.newer else "0.5.17",
                "model_path": str(self.directory),
                "max_total_num_tokens": self.tokens,
                "dp_size": self.copies,
                "enable_lora": True,
                "enable_return_routed_experts": bool(self.replay.layers),
            }
        )

    async def generate(self, request):
        body = await request.json()
        self.asked.append(body)
        if not body.get("stream"):
            return JSONResponse([event async for event in self.events(body)][-1])

        async def lines():
            async for event in self.events(body):
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def events(self, body):
        """What the server says after each token; the last one has the reason of the end."""
        settings, prompt, rid = body["sampling_params"], list(body["input_ids"]), body["rid"]
        key, ids, pairs, spans, finish = body.get("extra_key"), [], [], [], None
        cached = next((n for n in range(len(prompt) - 1, 0, -1) if (key, *prompt[:n]) in self.seen), 0)
        self.in_flight += 1
        try:
            while finish is None:
                await asyncio.sleep(self.delay_s)
                await self.running.wait()
                if any(rid.startswith(word) for word in self.aborted):
                    finish = {"type": "abort", "message": "Aborted"}
                else:
                    token, logprob = self.sample([*prompt, *ids], settings["temperature"])
                    ids.append(token)
                    self.sampled += 1
                    pairs.append([logprob, token, None])
                    spans.append({"version": self.version, "start": len(ids) - 1, "end": len(ids)})
                    if token in settings.get("stop_token_ids", ()):
                        finish = {"type": "stop", "matched": token}
                    elif len(ids) >= settings["max_new_tokens"]:
                        finish = {"type": "length", "length": len(ids)}
                meta = {"id": rid, "finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(ids)}
                meta |= {"cached_tokens": cached, "weight_version": self.version, "output_token_logprobs": pairs}
                if self.newer:
                    meta["weight_versions"] = spans
                if finish is not None and body.get("return_routed_experts"):
                    meta["routed_experts"] = self.experts([*prompt, *ids], body["routed_experts_start_len"])
                yield {"output_ids": ids, "meta_info": meta}
        finally:
            self.in_flight -= 1
            self.seen |= {(key, *[*prompt, *ids][:n]) for n in range(1, len(prompt) + len(ids) + 1)}

    def sample(self, ids, temperature):
        with torch.no_grad():
            logprobs = torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0, -1] / temperature, -1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=self.dice))
        return token, float(logprobs[token])

    def experts(self, ids, start):
        self.replay.recorded = {}
        with torch.no_grad():
            self.model(input_ids=torch.tensor([ids]))
        chosen = self.replay.experts()[start:-1].astype("<i4")
        return base64.b64encode(np.ascontiguousarray(chosen).tobytes()).decode()

    async def call(self, request):
        name, body = request.url.path[1:], await request.json()
        self.calls.append((name, body))
        if name == self.silent:
            await asyncio.Event().wait()
        if name == "pause_generation":
            self.running.clear()
        elif name == "continue_generation":
            self.running.set()
        elif name == "abort_request":
            self.aborted.add(body["rid"])
        elif name == "update_weights_from_disk":
            path = Path(body["model_path"])
            if (path / "config.json").is_file():
                self.model = load_model(path)
                self.replay = RoutingReplay(self.model)
            else:
                self.take(load_file(path / "model.safetensors"))
        elif name == "update_weights_from_tensor":
            self.take(dict(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))))
        elif name == "load_lora_adapter":
            self.adapters.append(body["lora_name"])
        if name.startswith("update_weight"):
            self.version = body.get("weight_version") or body["new_version"]
        return JSONResponse({"success": True, "message": "done"})

    def take(self, tensors):
        _, unexpected = self.model.load_state_dict(tensors, strict=False)
        assert not unexpected, unexpected
        self.model.tie_weights()

    @contextlib.asynccontextmanager
    async def served(self, port=0):
        """On a port, until the block ends or `die` is called."""
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port or self.port))
            self.port = sock.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            settings = uvicorn.Config(self.app, log_level="critical", lifespan="off", timeout_graceful_shutdown=0)
            self.runner = uvicorn.Server(settings)
            self.serving = asyncio.create_task(self.runner.serve(sockets=[sock]))
            while not self.runner.started:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            try:
                yield self
            finally:
                await self.die()

    async def die(self):
        """Every connection breaks off, and the port refuses."""
        for connection in list(self.runner.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        self.runner.should_exit = self.runner.force_exit = True
        await asyncio.gather(self.serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def emulated(model, **settings):
    """A served emulator of a model directory."""
    async with Emulator(model, **settings).served() as server:
        yield server

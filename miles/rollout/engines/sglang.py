"""Client of an SGLang server: ids in, ids, logprobs and weight versions out, over its `/generate`.

Source of the wire format: SGLang 0.5.17 to 0.5.23. Newer servers name the version of every span of tokens. Older
ones name the present version in each event of a stream; without a stream only the last one, and then every token
carries the oldest that it may have: the one that was served when the request was sent.
"""

import asyncio
import contextlib
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx

from miles.deltas import LocalCheckpoint
from miles.errors import ConfigError, EngineError, EngineLost
from miles.processes import scratch_folder
from miles.rollout.engines.base import OnTokens
from miles.types import BroadcastPlan, Finish, Generated, GenerateRequest, Weights, WeightVersion

__all__ = ["SGLangEngine"]


class SGLangEngine:
    """One running server. `start` waits for it and asks how long its contexts are."""

    def __init__(self, url: str, *, temperature: float = 1.0, timeout_s: float = 600.0, start_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self._temperature, self._start_s = temperature, start_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )
        self._aborts: set[asyncio.Task[None]] = set()
        self._version: WeightVersion = 0
        self._local: LocalCheckpoint | None = None
        self._group, self._ranks = "", 1
        self._adapters: list[str] = []  # loaded ones, the newest last
        self._life = secrets.token_hex(4)  # names of adapters that an earlier client left may not be taken again
        self._context_length = 0
        self.model_path = ""

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def context_length(self) -> int:
        return self._context_length

    async def start(self) -> None:
        """Wait until the server answers; ConfigError when it does not or is no SGLang server."""
        deadline = asyncio.get_running_loop().time() + self._start_s
        while True:
            try:
                info = await self._get("/server_info", "/get_server_info")
                break
            except httpx.TransportError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise ConfigError(f"no SGLang server answers at {self.url}: {error}") from error
                await asyncio.sleep(0.5)
        if "max_total_num_tokens" not in info:
            raise ConfigError(f"{self.url} is no SGLang server: its /server_info does not say how many tokens it holds")
        self._ranks = int(info.get("tp_size") or 1)
        served = (await self._get("/v1/models")).get("data") or [{}]
        limits = [info.get("context_length"), served[0].get("max_model_len"), info["max_total_num_tokens"]]
        self._context_length = min(int(limit) for limit in limits if limit)
        self.model_path = str(info.get("model_path") or "")
        model = await self._get("/model_info", "/get_model_info")
        self._version = _version(model.get("weight_version"))

    async def _get(self, *paths: str) -> dict[str, Any]:
        """The first of several names of one thing that this server has."""
        for path in paths:
            reply = await self._http.get(path)
            if reply.status_code == 200:
                data = reply.json()
                return data if isinstance(data, dict) else {}
        return {}

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generated:
        began, finished = self._version, False
        body = {
            "rid": request.id,
            "input_ids": list(request.prompt_ids),
            "sampling_params": {
                "max_new_tokens": request.max_tokens,
                "temperature": self._temperature,
                "top_p": 1.0,
                "top_k": -1,
                "stop_token_ids": list(request.stop_token_ids),
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "stream": on_tokens is not None,
            # Keys and values of older weights must not serve as a prefix: each version has a part of the cache of its
            # own. (Flushing it in an update can kill 0.5.17.)
            "extra_key": f"v{began}",
        }
        adapter = self._adapters[-1] if self._adapters else None
        if adapter is not None:
            body["lora_path"] = adapter
        try:
            reply = await self._stream(body, on_tokens) if on_tokens is not None else await self._whole(body)
            finished = True
        except httpx.TransportError as error:
            raise EngineLost(f"the SGLang server at {self.url} is gone: {type(error).__name__} {error}") from error
        finally:
            if not finished:
                self._abort_soon(request.id)
        generated = _generated(reply, began)
        if adapter is None:
            return generated
        return replace(generated, versions=(began,) * len(generated.output_ids))  # the server knows only its base's

    async def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._http.post("/generate", json=body)
        _refuse_errors(reply.status_code, reply.text)
        data: dict[str, Any] = reply.json()
        return data

    async def _stream(self, body: dict[str, Any], on_tokens: OnTokens) -> dict[str, Any]:
        last: dict[str, Any] | None = None
        ids: list[int] = []
        pairs: list[Any] = []
        versions: list[str] = []
        async with self._http.stream("POST", "/generate", json=body) as reply:
            if reply.status_code != 200:
                _refuse_errors(reply.status_code, (await reply.aread()).decode("utf-8", "replace"))
            async for data in _events(reply):
                if "error" in data:
                    told = data["error"]
                    raise EngineError(f"SGLang: {told.get('message') if isinstance(told, dict) else told}")
                meta = data["meta_info"]
                total = int(meta.get("completion_tokens") or 0)
                ids = _joined(ids, data.get("output_ids"), total)
                pairs = _joined(pairs, meta.get("output_token_logprobs"), total)
                versions += [str(meta.get("weight_version"))] * (len(ids) - len(versions))
                last = data
                on_tokens(tuple(ids))
        if last is None:
            raise EngineLost(f"the SGLang server at {self.url} ended a stream without an answer")
        spans = [{"version": v, "start": place, "end": place + 1} for place, v in enumerate(versions)]
        told = {"weight_versions": spans, **last["meta_info"], "output_token_logprobs": pairs}
        return {**last, "output_ids": ids, "meta_info": told}

    def _abort_soon(self, rid: str) -> None:
        """Tell the server that nobody waits for a request any more."""
        task = asyncio.create_task(self._abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rid: str) -> None:
        try:
            await self._http.post("/abort_request", json={"rid": rid}, timeout=10.0)
        except (httpx.HTTPError, RuntimeError):
            return  # gone, or closed meanwhile: then it generates for nobody no more

    async def load(self, weights: Weights) -> float:
        """Load a directory of safetensors, or a directory and deltas, or an adapter, that the server can read too."""
        try:
            return await self._load(weights)
        except httpx.TransportError as error:
            raise EngineLost(f"the SGLang server at {self.url} is gone: {type(error).__name__} {error}") from error

    async def _load(self, weights: Weights) -> float:
        if weights.broadcast is not None:
            return await self._receive(weights.broadcast, weights.version)
        if weights.directory is None:
            raise EngineError("an SGLang server takes weights from a directory: publish.kind=safetensors or delta")
        if weights.adapter is not None:
            return await self._load_adapter(weights)
        directory = weights.directory
        if weights.deltas:  # a stock server knows no deltas: it loads a copy that we keep up to date
            if self._local is None:
                self._local = LocalCheckpoint(scratch_folder("received", directory.parent.parent))
            await asyncio.to_thread(self._local.sync, directory, weights.deltas)
            directory = self._local.directory
        body = {
            "model_path": str(directory),
            "weight_version": str(weights.version),
            "flush_cache": False,
        }
        began = asyncio.get_running_loop().time()
        async with self._paused():
            await self._post("/update_weights_from_disk", body)
        self._version = weights.version
        return asyncio.get_running_loop().time() - began

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Requests in flight wait, and begin their prefill again afterwards."""
        await self._http.post("/pause_generation", json={"mode": "retract"})
        try:
            yield
        finally:
            await self._http.post("/continue_generation", json={})

    @property
    def receivers(self) -> int:
        """Processes of the server that take part in a broadcast."""
        return self._ranks

    async def _receive(self, plan: BroadcastPlan, version: WeightVersion) -> float:
        """Have the server receive a broadcast. Servers from 0.5.21 on want the update between two calls of theirs."""
        if self._group != plan.group:
            body: dict[str, Any] = {
                "master_address": plan.address,
                "master_port": plan.port,
                "rank_offset": 1,
                "world_size": plan.world,
                "group_name": plan.group,
                "backend": plan.backend,
            }
            await self._post("/init_weights_update_group", body)
            self._group = plan.group
        body = {
            "names": plan.names,
            "dtypes": plan.dtypes,
            "shapes": plan.shapes,
            "group_name": plan.group,
            "flush_cache": False,
            "weight_version": str(version),
        }
        began = asyncio.get_running_loop().time()
        async with self._paused():
            bracketed = (await self._http.post("/begin_weight_update", json={"selector": "all"})).status_code != 404
            await self._post("/update_weights_from_distributed", body)
            if bracketed:
                await self._post("/end_weight_update", {})
        self._version = version
        return asyncio.get_running_loop().time() - began

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        reply = await self._http.post(path, json=body)
        _refuse_errors(reply.status_code, reply.text)

    async def _load_adapter(self, weights: Weights) -> float:
        """A new name for every version: requests in flight go on with the adapter that they began with."""
        name = f"{weights.adapter}-{self._life}-v{weights.version}"
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(weights.directory)})
        self._adapters.append(name)
        self._version = weights.version
        for old in self._adapters[:-2]:
            await self._http.post("/unload_lora_adapter", json={"lora_name": old})
        self._adapters = self._adapters[-2:]
        return 0.0

    async def close(self) -> None:
        """Let go of the server; it goes on running."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2.0)
        adapters, self._adapters = self._adapters, []
        with contextlib.suppress(httpx.HTTPError):
            for name in adapters:
                await self._http.post("/unload_lora_adapter", json={"lora_name": name}, timeout=5.0)
        await self._http.aclose()
        if self._local is not None:
            shutil.rmtree(self._local.directory, ignore_errors=True)


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _joined(so_far: list[Any], new: list[Any] | None, total: int) -> list[Any]:
    """All entries so far; servers send either all of them each time or the new ones."""
    new = new or []
    return list(new) if len(new) == total else [*so_far, *new]


def _generated(reply: dict[str, Any], began: WeightVersion) -> Generated:
    meta = reply["meta_info"]
    ids, pairs = reply.get("output_ids") or [], meta.get("output_token_logprobs") or []
    total = meta.get("completion_tokens")
    if len(ids) != len(pairs) or (total is not None and total != len(ids)):
        raise EngineError(
            f"SGLang returned {len(ids)} ids and {len(pairs)} logprobs for {total} completion tokens; "
            "the turn is refused"
        )
    if [pair[1] for pair in pairs] != list(ids):
        raise EngineError("SGLang returned logprobs of other tokens than it sampled; the turn is refused")
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort" and int(reason.get("status_code") or 0) == 400:
        raise EngineError(f"SGLang refused the request: {reason.get('message')}")
    finish = {"stop": Finish.STOP, "length": Finish.LENGTH}.get(str(reason.get("type")), Finish.ABORT)
    return Generated(
        output_ids=tuple(ids),
        logprobs=tuple(None if pair[0] is None else float(pair[0]) for pair in pairs),
        versions=_versions(meta, len(ids), began),
        finish=finish,
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def _versions(meta: dict[str, Any], count: int, began: WeightVersion) -> tuple[WeightVersion, ...]:
    spans: Sequence[dict[str, Any]] = meta.get("weight_versions") or ()
    versions = [began] * count
    for span in spans:
        for place in range(max(0, int(span["start"])), min(count, int(span["end"]))):
            versions[place] = _version(span["version"])
    return tuple(versions)


def _version(name: Any) -> WeightVersion:
    """Servers name versions by text; one that is no number is that of the first weights."""
    return int(name) if str(name).isdecimal() else 0


def _refuse_errors(status: int, text: str) -> None:
    if status == 200:
        return
    message = f"SGLang answered {status}: {text[:300]}"
    raise EngineLost(message) if status in (502, 503, 504) else EngineError(message)

"""New weights for one SGLang server: from a directory, by value, over a process group, as an adapter.

An update can kill a server: flushing the cache while requests are in flight ends 0.5.17, and tensors that come by
shared memory from a process that is no relative end every version. So nothing is flushed where that is not known to
be safe, and tensors go by value.
"""

import asyncio
import base64
import pickle
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from miles.errors import EngineError, EngineLost
from miles.http import Http, Unreachable
from miles.rollout.engines.sglang.facts import ServerFacts
from miles.types import BroadcastPlan, Weights, WeightVersion

__all__ = ["WeightUpdates", "refuse_errors"]

_PIECE = 32 << 20  # bytes of tensors in one request
_MOST = 256 << 20  # JSON and base64 are slow: more than this belongs into a directory


class WeightUpdates:
    """What one server was given; `adapter` names the adapter that it must be asked for, if any."""

    def __init__(self, http: Http, facts: ServerFacts) -> None:
        self._http, self._facts = http, facts
        self._group = ""
        self._adapters: list[str] = []  # loaded ones, the newest last
        self._unloading: set[asyncio.Task[None]] = set()
        self._life = secrets.token_hex(4)  # names of adapters that an earlier client left may not be taken again

    @property
    def adapter(self) -> str | None:
        return self._adapters[-1] if self._adapters else None

    async def load(self, weights: Weights, pause: AbstractAsyncContextManager[None], *, flush: bool) -> None:
        """Have the server load; `pause` is held around what must not sample. Raises EngineError when it refuses."""
        if self._facts.copies > 1 and (weights.broadcast or weights.tensors or weights.adapter):
            raise EngineError(
                "a server with several data-parallel copies takes whole weights from a directory only: "
                "publish.kind=safetensors or delta without an adapter, or more servers instead of engine.sglang.dp"
            )
        if weights.broadcast is not None:
            await self._receive(weights.broadcast, weights.version, pause, flush)
        elif weights.tensors is not None:
            await self._by_value(weights.tensors, weights.version, pause, flush)
        elif weights.directory is None:
            raise EngineError("an SGLang server takes weights from a directory: publish.kind=safetensors or delta")
        elif weights.adapter is not None:
            await self._load_adapter(weights.adapter, str(weights.directory), weights.version, pause)
        else:
            body = {"model_path": str(weights.directory), **_facts_of(weights.version, flush)}
            async with pause:
                await self._post("/update_weights_from_disk", body)

    async def _receive(
        self, plan: BroadcastPlan, version: WeightVersion, pause: AbstractAsyncContextManager[None], flush: bool
    ) -> None:
        """Have the server receive a broadcast."""
        if self._group != plan.group:
            if self._group:
                with suppress(EngineError):  # its other members may be gone
                    await self._post("/destroy_weights_update_group", {"group_name": self._group})
            body: dict[str, Any] = {
                "master_address": plan.address,
                "master_port": plan.port,
                "rank_offset": plan.offset,
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
            **_facts_of(version, flush),
        }
        async with pause, self._bracket():
            await self._post("/update_weights_from_distributed", body)

    async def _by_value(
        self,
        tensors: Mapping[str, Any],
        version: WeightVersion,
        pause: AbstractAsyncContextManager[None],
        flush: bool,
    ) -> None:
        pieces = list(_pieces(tensors))
        async with pause, self._bracket():
            for piece in pieces:
                body = {"serialized_named_tensors": [piece] * self._facts.ranks, **_facts_of(version, flush)}
                await self._post("/update_weights_from_tensor", body)

    @asynccontextmanager
    async def _bracket(self) -> AsyncIterator[None]:
        """begin_weight_update … end_weight_update, where the server wants them."""
        if not self._facts.brackets:
            yield
            return
        await self._post("/begin_weight_update", {"selector": "all"})
        try:
            yield
        finally:
            await self._post("/end_weight_update", {})

    async def _load_adapter(
        self, name: str, path: str, version: WeightVersion, pause: AbstractAsyncContextManager[None]
    ) -> None:
        """A new name for every version: requests in flight go on with the adapter that they began with."""
        if not self._facts.lora:
            raise EngineError(
                "the SGLang server takes no adapters: start it with --enable-lora, --max-lora-rank and "
                "--lora-target-modules (a server on a CPU cannot)"
            )
        loaded = f"{name}-{self._life}-v{version}"
        await self._post("/load_lora_adapter", {"lora_name": loaded, "lora_path": path})
        async with pause:
            self._adapters.append(loaded)
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        old, self._adapters = self._adapters[:-2], self._adapters[-2:]
        for gone in old:  # the server waits for its last request: not the run's time
            task = asyncio.create_task(self._unload(gone))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, name: str) -> None:
        with suppress(Unreachable):
            await self._http.post("/unload_lora_adapter", {"lora_name": name})

    async def close(self) -> None:
        """Unload what was loaded beside the model."""
        adapters, self._adapters = self._adapters, []
        for task in tuple(self._unloading):
            task.cancel()
        with suppress(Unreachable):
            for name in adapters:
                await self._http.post("/unload_lora_adapter", {"lora_name": name}, limit_s=5.0)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        reply = await self._http.post(path, body)
        refuse_errors(reply.status, reply.text)
        with suppress(ValueError):
            told = reply.json()
            if isinstance(told, dict) and told.get("success") is False:
                raise EngineError(f"SGLang refused {path}: {told.get('message') or told.get('error_message')}")


def _facts_of(version: WeightVersion, flush: bool) -> dict[str, Any]:
    return {"weight_version": str(version), "flush_cache": flush}


def _pieces(tensors: Mapping[str, Any]) -> Iterator[str]:
    """Tensors on the CPU as the server unpickles them, in requests of bounded size."""
    sizes = {name: int(tensor.numel()) * int(tensor.element_size()) for name, tensor in tensors.items()}
    if sum(sizes.values()) > _MOST:
        raise EngineError(
            f"{sum(sizes.values()) >> 20} MiB of weights by value would take minutes: publish.kind=safetensors or delta"
        )
    piece: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in tensors.items():
        if piece and size + sizes[name] > _PIECE:
            yield base64.b64encode(pickle.dumps(piece)).decode()
            piece, size = [], 0
        piece.append((name, tensor))
        size += sizes[name]
    if piece:
        yield base64.b64encode(pickle.dumps(piece)).decode()


def refuse_errors(status: int, text: str) -> None:
    """EngineLost for what another try may find mended, EngineError for a refusal."""
    if status == 200:
        return
    message = f"SGLang answered {status}: {text[:300]}"
    raise EngineLost(message) if status >= 500 else EngineError(message)

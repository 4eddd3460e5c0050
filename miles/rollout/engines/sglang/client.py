"""Client of one SGLang server: ids in, ids, logprobs and weight versions out, over its `/generate`.

Source of the wire format: SGLang 0.5.17 to 0.5.23. Newer servers name the version of every span of tokens. Older
ones name the present version in each event of a stream; without a stream only the last one, and then every token
carries the oldest that it may have: the one that was served when the request was sent. With on_update=resume no
request spans an update, so versions are exact on all of them.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

from miles.errors import ConfigError, EngineError, EngineLost
from miles.http import Http, Lines, Unreachable
from miles.rollout.engines.base import OnTokens
from miles.rollout.engines.sglang.config import OnUpdate
from miles.rollout.engines.sglang.facts import ServerFacts, ask_facts, served_version, version_of
from miles.rollout.engines.sglang.gate import Gate
from miles.rollout.engines.sglang.sampling import Piece, Sampling, read_reply
from miles.rollout.engines.sglang.updates import WeightUpdates, refuse_errors
from miles.types import Finish, Generated, GenerateRequest, Weights, WeightVersion

__all__ = ["SGLangClient"]

_END_S = 60.0  # what requests get to end before an update
_PROBE_S = 10.0
_DYING_S = 0.5


class SGLangClient:
    """One running server. `start` waits for it and asks what it can.

    `follow`: somebody else may update the server's weights; else tokens of other weights than those that this client
    loaded mean that the server was started anew, and are refused as EngineLost. `gate` may be shared by clients that
    are updated together.
    """

    def __init__(
        self,
        url: str,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        on_update: OnUpdate = "resume",
        follow: bool = False,
        gate: Gate | None = None,
        timeout_s: float = 600.0,
        start_s: float = 300.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._temperature, self._seed, self._on_update = temperature, seed, on_update
        self._follow, self._start_s = follow, start_s
        self._http = Http(self.url, silence_s=timeout_s)
        self._gate, self._shared = gate or Gate(), gate is not None
        self._gate.enders.append(self.abort)
        self._loading = False
        self._aborts: set[asyncio.Task[None]] = set()
        self._facts: ServerFacts | None = None
        self._updates: WeightUpdates | None = None
        self._life, self._count = secrets.token_hex(4), itertools.count()

    @property
    def version(self) -> WeightVersion:
        return self._gate.version

    @property
    def facts(self) -> ServerFacts:
        """What the server can; known after `start`."""
        assert self._facts is not None, "not started"
        return self._facts

    @property
    def context_length(self) -> int:
        return self.facts.context

    @property
    def model_path(self) -> str:
        return self.facts.model_path

    @property
    def adapter(self) -> str | None:
        """The adapter that requests name."""
        return self._updates.adapter if self._updates else None

    async def start(self) -> None:
        """Wait until the server answers; ConfigError when it does not or is no SGLang server."""
        deadline = asyncio.get_running_loop().time() + self._start_s
        while True:
            try:
                self._facts, version = await ask_facts(self._http)
                break
            except Unreachable as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise ConfigError(f"no SGLang server answers at {self.url}: {error}") from error
                await asyncio.sleep(0.5)
        self._updates = WeightUpdates(self._http, self._facts)
        if not self._shared:  # what is behind a shared gate is told by whoever updates all of it
            self._gate.version = version
        if not self._follow:  # a run before this one may have ended in the middle of an update
            with contextlib.suppress(Unreachable):
                await self._http.post("/continue_generation", {})

    def behind(self, facts: ServerFacts) -> None:
        """Instead of `start`: this is a router, and the servers behind it are like that one."""
        self._facts = facts
        self._gate.enders.remove(self.abort)

    async def serves(self) -> bool:
        """Whether the server answers and has the weights that it was given: asked cheaply, without generating.

        An update that is under way meanwhile counts as serving.
        """
        version = self.version
        try:
            async with asyncio.timeout(_PROBE_S):
                if self.facts.ready and (await self._http.get("/ready")).status != 200:
                    return False
                served = await served_version(self._http)
        except (Unreachable, TimeoutError):
            return False
        return self._follow or served == version or version != self.version or self._loading

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generated:
        """Sample on this server, whatever it is updated to meanwhile."""
        sampling = Sampling(request, on_tokens)
        while sampling.finish is None:
            await self.sample(sampling)
        return sampling.generated()

    async def sample(
        self, sampling: Sampling, *, copy: int | None = None, headers: dict[str, str] | None = None
    ) -> None:
        """One request more; `sampling.finish` stays None when an update of the weights ended it.

        `copy`: which data-parallel copy of the model. `headers`: what a router wants to know. Raises EngineLost when
        the server died; what was streamed until then is in `sampling`.
        """
        await self._gate.opened()
        began, adapter = self.version, self.adapter
        # A server takes an id for all ids that begin with it, so the distinct part comes first and is of one length.
        rid = f"{self._life}{next(self._count):010x}-{sampling.request.id}"
        body = self._body(sampling, rid, began, adapter, copy)
        piece, finished, interrupted = Piece(), False, False
        with self._gate.inside(rid):
            try:
                if sampling.on_tokens is None:
                    reply = await self._whole(body, headers)
                else:
                    reply = await self._stream(body, headers, sampling, began)
                finished = True
                interrupted = self._gate.ended(rid)
                piece = self._read(reply, began, adapter, interrupted)
            except Unreachable as error:
                raise EngineLost(f"the SGLang server at {self.url} is gone: {error}") from error
            finally:
                if not finished:
                    self._abort_soon(rid)
        sampling.add(piece, interrupted=interrupted and piece.finish is Finish.ABORT)

    def _read(self, reply: dict[str, Any], began: WeightVersion, adapter: str | None, interrupted: bool) -> Piece:
        try:
            piece, named = read_reply(reply, began, shape=self.facts.shape)
        except EngineError:
            if interrupted:
                return Piece()  # ended in the middle of its bookkeeping: sampled again
            raise
        if adapter is not None:
            return replace(piece, versions=(began,) * len(piece.output_ids))  # requests keep their adapter
        if self._follow or named is None or version_of(named) in (began, self.version):
            return piece
        raise EngineLost(
            f"the SGLang server at {self.url} sampled with weights {named!r} instead of {began}: it was started anew, "
            "or somebody else updates it"
        )

    def _body(
        self, sampling: Sampling, rid: str, began: WeightVersion, adapter: str | None, copy: int | None
    ) -> dict[str, Any]:
        request, facts = sampling.request, self.facts
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": sampling.prompt,
            "sampling_params": {
                "max_new_tokens": sampling.left,
                "temperature": self._temperature,
                "top_p": 1.0,
                "top_k": -1,
                "stop_token_ids": list(request.stop_token_ids),
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "stream": sampling.on_tokens is not None,
            # Keys and values of older weights must not serve as a prefix: each version of each run has a part of the
            # cache of its own. (Flushing it in an update can kill 0.5.17.)
            "extra_key": f"{self._life}v{began}",
        }
        if facts.deterministic:
            text = f"{self._seed} {request.id} {sampling.pieces}"
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1
            body["sampling_params"]["sampling_seed"] = seed
        if facts.routing:
            body |= {"return_routed_experts": True, "routed_experts_start_len": sampling.routing_from}
        if copy is not None and facts.copies > 1:
            body["routed_dp_rank"] = copy
        if adapter is not None:
            body["lora_path"] = adapter
        return body

    async def _whole(self, body: dict[str, Any], headers: dict[str, str] | None) -> dict[str, Any]:
        # However long it takes: the server is watched, and its end breaks the connection.
        reply = await self._http.post("/generate", body, headers=headers, patient=True)
        refuse_errors(reply.status, reply.text)
        data: dict[str, Any] = reply.json()
        return data

    async def _stream(
        self, body: dict[str, Any], headers: dict[str, str] | None, sampling: Sampling, began: WeightVersion
    ) -> dict[str, Any]:
        last: dict[str, Any] | None = None
        ids: list[int] = []
        pairs: list[Any] = []
        versions: list[str] = []

        def so_far() -> dict[str, Any]:
            assert last is not None
            spans = [{"version": v, "start": place, "end": place + 1} for place, v in enumerate(versions)]
            told = {"weight_versions": spans, **last["meta_info"], "output_token_logprobs": pairs}
            return {**last, "output_ids": ids, "meta_info": told}

        try:
            async with self._http.stream("/generate", body, headers=headers) as reply:
                if reply.status != 200:
                    refuse_errors(reply.status, await reply.text())
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
                    sampling.told(ids)
            if last is None or not last["meta_info"].get("finish_reason"):
                raise Unreachable("its stream ended in the middle")
        except Unreachable:
            if last is None:
                raise
            if last["meta_info"].get("finish_reason"):
                return so_far()  # it broke off after its last event
            with contextlib.suppress(EngineError):  # what came is whole tokens: another server goes on after them
                sampling.add(self._read(so_far(), began, body.get("lora_path"), False), interrupted=True)
            raise
        return so_far()

    def _abort_soon(self, rid: str) -> None:
        """Tell the server that nobody waits for a request any more."""
        task = asyncio.create_task(self.abort([rid]))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def abort(self, rids: Iterable[str]) -> None:
        """End requests. One that has gone, or a server that has, is no error."""

        async def one(rid: str) -> None:
            with contextlib.suppress(Unreachable):
                await self._http.post("/abort_request", {"rid": rid}, limit_s=10.0)

        await asyncio.gather(*map(one, rids))

    async def load(self, weights: Weights) -> float:
        """Load what the server can reach; seconds in which it did not sample. EngineLost when it died of it."""
        assert self._updates is not None, "not started"
        flush = self.facts.brackets and self._on_update == "retract"
        pause = _Pause(self, weights)
        self._loading = True
        try:
            await self._updates.load(weights, pause, flush=flush)
            await self._confirm(weights.version)
        except Unreachable as error:
            raise EngineLost(f"the SGLang server at {self.url} is gone: {error}") from error
        except EngineLost as error:
            await asyncio.sleep(_DYING_S)
            with contextlib.suppress(Unreachable):
                await served_version(self._http)
                raise EngineError(f"{error.message}; the server at {self.url} lives: it cannot do this") from error
            raise
        finally:
            self._loading = False
        return pause.seconds

    async def _confirm(self, version: WeightVersion) -> None:
        served = await served_version(self._http)
        if served != version:
            raise EngineError(f"the SGLang server at {self.url} serves weights {served} after it was given {version}")

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """The server samples nothing during the block."""
        if self._on_update == "resume":
            async with self._gate.closed(_END_S), self._stopped("in_place"):
                yield
        else:
            async with self._stopped(self._on_update):
                yield

    @contextlib.asynccontextmanager
    async def _stopped(self, mode: str) -> AsyncIterator[None]:
        try:
            reply = await self._http.post("/pause_generation", {"mode": mode})
            refuse_errors(reply.status, reply.text)
            yield
        finally:
            try:
                await self._http.post("/continue_generation", {})
            except Unreachable:  # its answer may be what was lost
                await self._http.post("/continue_generation", {})

    def release(self, session: str) -> None:
        """Nothing is kept for sessions here."""

    async def close(self) -> None:
        """Let go of the server; it goes on running."""
        if self.abort in self._gate.enders:
            self._gate.enders.remove(self.abort)
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2.0)
        if self._updates is not None:
            await self._updates.close()
        await self._http.close()


class _Pause:
    """Around what changes the weights: the version is the new one before the next request is sent. Keeps the time.

    An adapter comes beside those that are in use: nothing needs to stand still.
    """

    def __init__(self, client: SGLangClient, weights: Weights) -> None:
        self._gate, self._version, self.seconds = client._gate, weights.version, 0.0
        self._block = client.paused() if weights.adapter is None else contextlib.nullcontext()

    async def __aenter__(self) -> None:
        self._began = asyncio.get_running_loop().time()
        await self._block.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:
        if exc[0] is None:
            self._gate.version = self._version
        await self._block.__aexit__(*exc)
        self.seconds = asyncio.get_running_loop().time() - self._began


async def _events(reply: Lines) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.lines:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def _joined(so_far: list[Any], new: list[Any] | None, total: int) -> list[Any]:
    """All entries so far; servers send either all of them each time or the new ones."""
    new = new or []
    return list(new) if len(new) == total else [*so_far, *new]

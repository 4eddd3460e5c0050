"""SGLang servers as one engine: sessions stay where their cache is, every server confirms every version.

A server that dies loses nothing but time: its requests go on elsewhere after the tokens that had come. It is started
anew, given the present weights, and only then given requests.
"""

import asyncio
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from miles.deltas import LocalCheckpoint
from miles.errors import ConfigError, EngineError, EngineLost
from miles.processes import scratch_folder
from miles.rollout.engines.base import OnTokens
from miles.rollout.engines.sglang.client import SGLangClient
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.fleet import Fleet, Member, first_ranks
from miles.rollout.engines.sglang.gate import Gate
from miles.rollout.engines.sglang.install import default_python
from miles.rollout.engines.sglang.process import has_gpu, server_arguments
from miles.rollout.engines.sglang.sampling import Sampling
from miles.types import Generated, GenerateRequest, Weights, WeightVersion

__all__ = ["SGLangEngine"]

log = logging.getLogger(__name__)
_AGAIN_S = 0.2  # before a router is asked again


class SGLangEngine:
    """An Engine of one or many servers.

    `lora`: rank and modules of adapters that will be published; `dtype`: that of the published weights.
    ConfigError, before anything is started, for what this machine cannot serve.
    """

    def __init__(
        self,
        model: Path,
        log_dir: Path,
        config: SGLangConfig | None = None,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        lora: tuple[int, Sequence[str]] | None = None,
        dtype: str = "auto",
    ) -> None:
        self.config = config or SGLangConfig()
        self._temperature, self._seed = temperature, seed
        python, arguments = Path(), []
        if not self.config.urls:
            python = self.config.python or default_python()
            arguments = server_arguments(self.config, model, gpu=has_gpu(), lora=lora, dtype=dtype)
        self._fleet = Fleet(
            self.config, self._client, self._prepare, python=python, arguments=arguments, log_dir=log_dir
        )
        self._weights: Weights | None = None
        self._local: LocalCheckpoint | None = None
        self._gate = Gate() if self.config.router else None
        self._router: SGLangClient | None = None
        self._context_length = 0

    @property
    def version(self) -> WeightVersion:
        return self._weights.version if self._weights else 0

    @property
    def wants_weights(self) -> asyncio.Event:
        """Set while no server can go on before weights are broadcast again."""
        return self._fleet.starved

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def pids(self) -> dict[str, int | None]:
        """The processes of the launched servers, by name."""
        members = self._fleet.members.values()
        return {member.name: member.process.pid if member.process else None for member in members}

    @property
    def description(self) -> str:
        """For people: what serves, and how much it holds."""
        facts = [member.facts for member in self._fleet.taking()]
        tokens = sum(fact.cache_tokens * fact.copies for fact in facts)
        releases = ", ".join(sorted({fact.release for fact in facts}))
        return f"sglang {releases}, servers {len(facts)}, {tokens} tokens of cache, on_update {self.config.on_update}"

    async def start(self) -> None:
        """Bring every server up. ConfigError when one cannot come up: then none stays."""
        await self._fleet.start()
        facts = [member.facts for member in self._fleet.taking()]
        self._context_length = min(fact.context for fact in facts)
        if self.config.record_routing and not all(fact.routing for fact in facts):
            raise ConfigError("engine.sglang.record_routing needs servers with --enable-return-routed-experts")
        if self.config.router:
            self._router = self._client(self.config.router)
            self._router.behind(facts[0])

    def _client(self, url: str) -> SGLangClient:
        return SGLangClient(
            url,
            temperature=self._temperature,
            seed=self._seed,
            on_update=self.config.on_update,
            gate=self._gate,
            timeout_s=self.config.timeout_s,
            start_s=self.config.start_s,
        )

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generated:
        """Sample on the session's server; when it dies or its weights change, go on after the tokens that came."""
        sampling = Sampling(request, on_tokens)
        tries = 0
        while sampling.finish is None:
            try:
                await self._sample(sampling)
            except EngineLost:
                tries += 1
                if tries > len(self._fleet.members) + 1:
                    raise
                self._fleet.counts["requests_moved"] += 1
                log.info("request %s goes on elsewhere", request.id, exc_info=True)
        generated = sampling.generated()
        self._fleet.counts["prompt_tokens"] += len(request.prompt_ids)
        self._fleet.counts["cached_tokens"] += generated.cached_tokens
        self._fleet.counts["requests"] += 1
        return generated

    async def _sample(self, sampling: Sampling) -> None:
        """One request to a server, when there is room for it."""
        session = sampling.request.session
        if self._router is not None:
            try:
                await self._router.sample(sampling, headers={"x-smg-routing-key": session})
            except EngineLost:
                await asyncio.sleep(_AGAIN_S)
                raise
            return
        tokens = sampling.length + int(self.config.reserve * sampling.left)
        limit_s = self.config.start_s + self.config.timeout_s  # a server that is being replaced is waited for
        async with self._fleet.placement.seat(session, tokens, limit_s=limit_s) as seat:
            member = self._fleet.members[seat.server]
            client = member.client
            if client is None or not member.up:
                raise EngineLost(f"{member.name} has just ended")
            try:
                await client.sample(sampling, copy=seat.copy)
            except EngineLost:
                await self._fleet.trouble(member, client)
                raise

    def release(self, session: str) -> None:
        """A session has ended: nothing needs to be kept for it."""
        self._fleet.placement.release(session)

    async def receivers(self) -> tuple[int, int]:
        """Processes of all servers that will take part in a broadcast, and a number that changes when they do."""
        for member in self._fleet.taking():
            await self._fleet.lost_unless_serving(member, member.client)
        await self._fleet.anyone(waiting=True)
        return sum(member.facts.ranks for member in self._fleet.taking()), self._fleet.epoch

    async def load(self, weights: Weights) -> float:
        """Have every server confirm new weights; seconds in which the slowest did not sample.

        A server that dies of it is replaced; one that dies of a broadcast may take the others with it, since they wait
        for each other until the sender gives up. EngineLost when none is left.
        """
        async with self._fleet.loading:
            known = await self._readable(weights)
            self._weights = weights
            taking = self._fleet.taking()
            plan = weights.broadcast
            if plan is not None and sum(member.facts.ranks for member in taking) != plan.world - 1:
                raise EngineLost("servers came or went while a broadcast was planned")
            try:
                found = await asyncio.gather(
                    *(self._give(member, part) for member, part in zip(taking, _parts(known, taking), strict=True)),
                    return_exceptions=True,
                )
            except asyncio.CancelledError:  # the sender gave up: who was left in the middle of it serves nobody
                for member in taking if plan is not None else ():
                    self._fleet.lost(member)
                raise
        pauses: list[float] = []
        for member, result in zip(taking, found, strict=True):
            if isinstance(result, float):
                pauses.append(result)
                if member.state == "waiting":
                    self._fleet.join(member)
            elif isinstance(result, EngineLost) and weights.broadcast is None:
                self._fleet.lost(member)
            elif isinstance(result, BaseException):
                raise result
        if not pauses:
            await self._fleet.anyone()
        return max(pauses, default=0.0)

    async def _prepare(self, member: Member) -> bool:
        """Bring a server that came back to the present weights; False when it must wait for them."""
        weights = self._weights
        if weights is None:
            return True
        if weights.broadcast is not None:
            return False
        await self._give(member, await self._readable(weights))
        return True

    async def _give(self, member: Member, weights: Weights) -> float:
        assert member.client is not None
        if self._router is not None and weights.adapter is not None:
            raise EngineError("adapters are named for each server; leave engine.sglang.router empty to train one")
        return await member.client.load(weights)

    async def _readable(self, weights: Weights) -> Weights:
        """Stock servers know no deltas: they load a copy that is kept up to date here."""
        if not weights.deltas:
            return weights
        if weights.directory is None:
            raise EngineError("deltas need the snapshot that they begin with")
        if self._local is None:
            self._local = LocalCheckpoint(scratch_folder("received", weights.directory.parent.parent))
        await asyncio.to_thread(self._local.sync, weights.directory, weights.deltas)
        return replace(weights, directory=self._local.directory, deltas=())

    def counters(self) -> dict[str, float]:
        """For a step's metrics, since the last call; and how full the caches are now."""
        fleet = self._fleet
        counts = dict(fleet.counts)
        fleet.counts.clear()
        found = {
            "engine/servers": float(sum(member.up for member in fleet.members.values())),
            "engine/waiting": float(fleet.placement.waiting),
            "engine/requests": float(counts.get("requests", 0)),
        }
        if counts.get("prompt_tokens"):
            found["engine/prefix_hit"] = counts["cached_tokens"] / counts["prompt_tokens"]
        loads = {}
        for seat in fleet.placement.seats():
            loads[f"engine/load/{seat.server.rpartition('/')[2]}.{seat.copy}"] = seat.load
        rare = ("requests_moved", "servers_lost", "servers_back")
        return found | loads | {f"engine/{name}": float(counts[name]) for name in rare if name in counts}

    async def close(self) -> None:
        """End the launched servers; others go on running."""
        await self._fleet.close()
        if self._router is not None:
            await self._router.close()
        if self._local is not None:
            await asyncio.to_thread(shutil.rmtree, self._local.directory, ignore_errors=True)


def _parts(weights: Weights, members: Sequence[Member]) -> list[Weights]:
    """What each server is told: the same, but for its place in a broadcast's group."""
    plan = weights.broadcast
    if plan is None:
        return [weights] * len(members)
    return [replace(weights, broadcast=replace(plan, offset=offset)) for offset in first_ranks(members)]

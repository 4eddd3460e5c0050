"""Servers that are looked after: launched or found, probed, replaced when they die, given requests when ready."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles.errors import ConfigError, EngineLost
from miles.rollout.engines.sglang.client import SGLangClient
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.facts import ServerFacts
from miles.rollout.engines.sglang.placement import Placement
from miles.rollout.engines.sglang.process import ServerProcess

__all__ = ["Fleet", "Member", "first_ranks"]

log = logging.getLogger(__name__)
_DYING_S = 0.2  # a server whose connections break off may answer for a moment more
_MISSES = 3  # looks in a row that a server may not answer
_BACK_OFF_S = (1.0, 5.0, 15.0, 60.0)


@dataclass(eq=False)
class Member:
    """One server's place; the server in it may be replaced."""

    name: str
    url: str = ""
    number: int = -1
    """Which of the launched ones; -1: it was found running."""
    process: ServerProcess | None = None
    client: SGLangClient | None = None
    state: Literal["down", "waiting", "up", "gone"] = "down"
    """waiting: it runs, but its weights are still to come. gone: it is not replaced any more."""
    deaths: int = 0
    keeper: "asyncio.Task[None] | None" = None

    @property
    def up(self) -> bool:
        return self.state == "up"

    @property
    def launched(self) -> bool:
        return self.number >= 0

    @property
    def down(self) -> bool:
        return self.state == "down"

    @property
    def facts(self) -> ServerFacts:
        """What the server in this place can."""
        assert self.client is not None, f"{self.name} has no server"
        return self.client.facts


def first_ranks(members: Sequence[Member], first: int = 1) -> list[int]:
    """Where each server's own processes begin in a process group that holds all of them, from `first` on."""
    return list(itertools.accumulate((member.facts.ranks for member in members), initial=first))[:-1]


class Fleet:
    """Servers of one model. `client` makes the client of a URL.

    `prepare` is called, under `loading`, with a server that came back: it brings it to the present weights and returns
    True, or False when the server must wait for them. `loading` is held by whoever changes weights.
    """

    def __init__(
        self,
        config: SGLangConfig,
        client: Callable[[str], SGLangClient],
        prepare: Callable[[Member], Awaitable[bool]],
        *,
        python: Path,
        arguments: Sequence[str],
        log_dir: Path,
    ) -> None:
        self.config, self.log_dir = config, log_dir
        self._client, self._prepare = client, prepare
        self._python, self._arguments = python, list(arguments)
        self.members = {url: Member(url, url) for url in config.urls}
        if not config.urls:
            numbers = range(config.servers)
            self.members = {f"sglang-{number}": Member(f"sglang-{number}", number=number) for number in numbers}
        self.placement = Placement(idle_s=config.idle_s, sticky=config.affinity)
        self.loading = asyncio.Lock()
        self.epoch = 0
        """Changes whenever other servers than before are there."""
        self.counts: Counter[str] = Counter()
        self.starved = asyncio.Event()
        """Set while servers run and none of them has weights that it may serve."""
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Bring every server up. ConfigError when one cannot come up: then none stays."""
        members = list(self.members.values())
        results = await asyncio.gather(*map(self._bring_up, members), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                await self.close()
                if isinstance(error, EngineLost):
                    raise ConfigError(str(error)) from error
                raise error
        for member in members:
            self.join(member)
            member.keeper = asyncio.create_task(self._keep(member))

    async def add(self, url: str) -> None:
        """Take in a server that runs already. ConfigError when it does not answer, or is there already."""
        if url in self.members:
            raise ConfigError(f"{url} is one of the servers already")
        member = Member(url, url)
        await self._bring_up(member)
        self.members[url] = member
        try:
            await self._let_in(member)
        except BaseException:
            del self.members[url]
            await self._end([member])
            raise
        member.keeper = asyncio.create_task(self._keep(member))

    async def remove(self, name: str) -> None:
        """Let a server go; one that was launched here is ended. KeyError for an unknown one."""
        member = self.members.pop(name)
        self.placement.remove(name)
        self.epoch += 1
        await self._end([member])

    def taking(self) -> list[Member]:
        """Those that can be given weights."""
        return [member for member in self.members.values() if member.state in ("up", "waiting")]

    def join(self, member: Member) -> None:
        """From now on the member gets requests."""
        member.state = "up"
        self.starved.clear()
        self.placement.add(member.name, member.facts.cache_tokens, member.facts.copies)
        self._news.set()

    def lost(self, member: Member) -> None:
        """Give a member no more requests; its keeper brings it back."""
        if member.state in ("up", "waiting"):
            member.state = "down"
            member.deaths += 1
            self.epoch += 1
            self.counts["servers_lost"] += 1
            self.placement.remove(member.name)
            self._look_for_starvation()
            log.warning("%s is lost (%s)", member.name, member.url)

    async def lost_unless_serving(self, member: Member, client: SGLangClient | None) -> None:
        """After trouble with `client`: give the member up, unless it is well, or has another server by now."""
        if member.client is client and not await self.serves(member) and member.client is client:
            self.lost(member)

    async def trouble(self, member: Member, client: SGLangClient | None) -> None:
        """A request broke off: the server is dead, started anew by somebody, or only too busy."""
        await asyncio.sleep(_DYING_S)
        await self.lost_unless_serving(member, client)

    def _look_for_starvation(self) -> None:
        states = {member.state for member in self.members.values()}
        if "up" not in states and "waiting" in states:
            self.starved.set()

    async def serves(self, member: Member) -> bool:
        """Whether a member answers with the weights that it was given."""
        if member.client is None or (member.process is not None and member.process.ended):
            return False
        return await member.client.serves()

    async def anyone(self, *, waiting: bool = False) -> None:
        """Wait until a server takes requests (or is `waiting` for weights); EngineLost when none will."""
        while not any(member.up or (waiting and member.state == "waiting") for member in self.members.values()):
            if all(member.state == "gone" for member in self.members.values()):
                raise EngineLost(self._obituary)
            self._news.clear()
            await self._news.wait()

    @property
    def _obituary(self) -> str:
        return (
            f"no SGLang server is left; their logs are in {self.log_dir}. Mend the cause and go on with "
            "`miles launch --resume RUN`"
        )

    async def close(self) -> None:
        """End the launched servers; others go on running."""
        await self._end(list(self.members.values()))

    async def _end(self, members: Sequence[Member]) -> None:
        keepers = [member.keeper for member in members if member.keeper]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(member.client.close() for member in members if member.client is not None))
        await asyncio.gather(*(member.process.stop() for member in members if member.process is not None))
        for member in members:
            member.client, member.process, member.state = None, None, "gone"

    async def _bring_up(self, member: Member) -> None:
        """Start a member's server, or wait for it, and learn what it can."""
        if member.launched:
            member.process = ServerProcess(
                self._python,
                self._arguments,
                self.log_dir / f"{member.name}.log",
                environment={**self.config.environment, **self._devices(member.number)},
            )
            await member.process.start(self.config.start_s)
            member.url = member.process.url
        client = self._client(member.url)
        try:
            await client.start()
        except BaseException:
            await client.close()
            raise
        member.client = client

    def _devices(self, number: int) -> dict[str, str]:
        """The GPUs of one launched server."""
        if not self.config.gpus:
            return {}
        share = self.config.tp * self.config.dp
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.config.gpus[number * share : (number + 1) * share])),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    async def _keep(self, member: Member) -> None:
        """Look after one member for as long as the fleet is open."""
        misses = 0
        while member.state != "gone":
            if not member.down:
                await asyncio.sleep(self.config.probe_s)
                client = member.client
                misses = 0 if await self.serves(member) else misses + 1
                ended = member.process is not None and member.process.ended
                if not member.down and member.client is client and (ended or misses >= _MISSES):
                    self.lost(member)
                continue
            misses = 0
            if member.deaths > self.config.restarts:
                log.error("%s failed %d times; the run goes on without it", member.name, member.deaths)
                member.state = "gone"
                if member.process is not None:
                    await member.process.stop()
                self._look_for_starvation()
                if all(other.state == "gone" for other in self.members.values()):
                    self.placement.give_up(self._obituary)
                self._news.set()
                return
            await asyncio.sleep(_BACK_OFF_S[min(member.deaths, len(_BACK_OFF_S)) - 1])
            try:
                await self._bring_back(member)
            except Exception as error:  # noqa: BLE001  whatever it is, the server is tried again
                member.deaths += 1
                log.warning("%s did not come back: %s", member.name, error)

    async def _bring_back(self, member: Member) -> None:
        """A new server in a member's place, at the present weights before it gets its first request."""
        client, member.client = member.client, None
        if client is not None:
            await client.close()
        if member.process is not None:
            await member.process.stop()
        await self._bring_up(member)
        await self._let_in(member)
        self.counts["servers_back"] += 1

    async def _let_in(self, member: Member) -> None:
        async with self.loading:
            self.epoch += 1
            if await self._prepare(member):
                self.join(member)
                return
            member.state = "waiting"
            self._look_for_starvation()
            self._news.set()

"""A gate before a server: closed while its weights change, so that every request is sampled by one version."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator

from miles.errors import EngineLost
from miles.types import WeightVersion

__all__ = ["Gate"]

_AGAIN_S = 0.25  # an abort can overtake the request that it means


class Gate:
    """Requests pass while it is open. Closing ends those inside and waits until they are out.

    `version` is that of the weights behind it. Several servers behind one gate (a router's) close it together.
    """

    def __init__(self) -> None:
        self.version: WeightVersion = 0
        self.enders: list[Callable[[Iterable[str]], Awaitable[None]]] = []
        """How to abort requests: one for each server behind the gate."""
        self._closers = 0
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._inside: set[str] = set()
        self._ended: set[str] = set()

    @property
    def is_closed(self) -> bool:
        return not self._open.is_set()

    async def opened(self) -> None:
        """Wait until requests may pass."""
        await self._open.wait()

    @contextlib.contextmanager
    def inside(self, rid: str) -> Iterator[None]:
        """Around one request; call it without awaiting anything after `opened`."""
        self._inside.add(rid)
        self._empty.clear()
        try:
            yield
        finally:
            self._inside.discard(rid)
            self._ended.discard(rid)
            if not self._inside:
                self._empty.set()

    def ended(self, rid: str) -> bool:
        """Whether the request that is inside was told to end, because the gate closes."""
        return rid in self._ended

    @contextlib.asynccontextmanager
    async def closed(self, limit_s: float) -> AsyncIterator[None]:
        """Nothing is inside during the block. EngineLost when aborted requests are not out in `limit_s`."""
        self._closers += 1
        self._open.clear()
        try:
            await self._emptied(limit_s)
            yield
        finally:
            self._closers -= 1
            if not self._closers:
                self._open.set()

    async def _emptied(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while self._inside:
                    self._ended |= self._inside
                    inside = tuple(self._inside)
                    await asyncio.gather(*(end(inside) for end in self.enders))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._empty.wait(), _AGAIN_S)
        except TimeoutError as error:
            raise EngineLost(f"{len(self._inside)} requests could not be ended within {limit_s:g} s") from error

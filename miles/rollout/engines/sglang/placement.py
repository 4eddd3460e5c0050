"""Which server a request goes to: its session's own, and only when the cache has room for it.

A session stays where its first request went, since the keys and values of its conversation lie there. A new one goes
to the least loaded seat; among equals rendezvous hashing decides, so that several processes that know nothing of each
other choose alike. A seat is one data-parallel copy of the model on one server, with a cache of its own.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import xxhash

from miles.errors import EngineLost

__all__ = ["Placement", "Seat"]

_LOOK_S = 1.0
_GRAIN = 16  # loads that differ by less than a sixteenth of the cache are equal


@dataclass(eq=False)
class Seat:
    """Room for `tokens` of keys and values. `used` by requests under way, `held` for sessions between requests."""

    server: str
    copy: int
    tokens: int
    used: int = 0
    held: int = 0
    requests: int = 0
    _idle: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Session -> (tokens of its conversation, when it was last seen), the longest idle first."""

    @property
    def load(self) -> float:
        """Share of the room that is used or held."""
        return (self.used + self.held) / self.tokens

    def hold(self, session: str, tokens: int, now: float) -> None:
        """Keep a session's room until its next request."""
        self.let_go(session)
        self._idle[session] = (tokens, now)
        self.held += tokens

    def let_go(self, session: str) -> None:
        """A session needs its room for a request, or never again."""
        self.held -= self._idle.pop(session, (0, 0.0))[0]

    def expire(self, before: float) -> list[str]:
        """Sessions that were not seen since then lose their claim; which ones."""
        gone: list[str] = []
        while self._idle and next(iter(self._idle.values()))[1] < before:
            gone.append(next(iter(self._idle)))
            self.let_go(gone[-1])
        return gone


@dataclass(eq=False)
class _Waiter:
    session: str
    tokens: int
    turn: asyncio.Future[Seat]


class Placement:
    """Seats of all servers that take requests, who sits where, and who waits."""

    def __init__(self, *, idle_s: float = 120.0, sticky: bool = True) -> None:
        self._idle_s, self._sticky = idle_s, sticky
        self._seats: list[Seat] = []
        self._draining: set[str] = set()
        self._at: dict[str, Seat] = {}
        self._waiters: list[_Waiter] = []
        self._round = itertools.count()
        self._hopeless = ""

    def add(self, server: str, tokens: int, copies: int = 1) -> None:
        """A server takes requests from now on; `tokens` is what each of its copies of the model can keep."""
        self.remove(server)
        self._hopeless = ""
        self._seats += [Seat(server, copy, tokens) for copy in range(copies)]
        self._admit()

    def drain(self, server: str) -> None:
        """No new sessions for a server; those that it has go on."""
        self._draining.add(server)

    def remove(self, server: str) -> None:
        """A server takes no requests any more; its sessions will be placed anew."""
        self._draining.discard(server)
        self._seats = [seat for seat in self._seats if seat.server != server]
        self._at = {session: seat for session, seat in self._at.items() if seat.server != server}

    def give_up(self, why: str) -> None:
        """No server will ever take a request again: who waits, and who comes, soon learns why."""
        self._hopeless = why

    def release(self, session: str) -> None:
        """A session has ended: its cache is worth nothing any more."""
        seat = self._at.pop(session, None)
        if seat is not None:
            seat.let_go(session)
            self._admit()

    @property
    def servers(self) -> list[str]:
        """Those that take requests."""
        return list(dict.fromkeys(seat.server for seat in self._seats))

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def seats(self) -> Iterator[Seat]:
        """For those who want to know how full they are."""
        return iter(self._seats)

    @contextlib.asynccontextmanager
    async def seat(self, session: str, tokens: int, *, limit_s: float | None = None) -> AsyncIterator[Seat]:
        """A seat with room for a request of `tokens` in all, the session's own if it has one.

        Waits for room, sessions that are under way before new ones; EngineLost when `limit_s` passes.
        """
        seat = await self._wait(session, tokens, limit_s)
        try:
            yield seat
        finally:
            self._leave(seat, session, tokens)

    async def _wait(self, session: str, tokens: int, limit_s: float | None) -> Seat:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(session, tokens, loop.create_future())
        self._waiters.append(waiter)
        deadline = None if limit_s is None else loop.time() + limit_s
        try:
            while not waiter.turn.done():
                if self._hopeless:
                    raise EngineLost(self._hopeless)
                self._admit()  # again and again: claims of idle sessions run out without anything happening
                left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - loop.time())
                if left <= 0 and not waiter.turn.done():
                    raise EngineLost(
                        f"no engine had room for a request of {tokens} tokens within {limit_s:g} s; servers that take "
                        f"requests: {', '.join(self.servers) or 'none'}"
                    )
                await asyncio.wait({waiter.turn}, timeout=left)
            return waiter.turn.result()
        except BaseException:
            if waiter.turn.done():  # let in at the moment of its cancellation
                self._leave(waiter.turn.result(), session, tokens)
            else:
                self._waiters.remove(waiter)
            raise

    def _leave(self, seat: Seat, session: str, tokens: int) -> None:
        seat.used -= tokens
        seat.requests -= 1
        if self._at.get(session) is seat:
            seat.hold(session, tokens, time.monotonic())
        self._admit()

    def _admit(self) -> None:
        """Let in who can be: sessions under way first, in order of arrival; nobody overtakes one of the same kind."""
        for seat in self._seats:
            for session in seat.expire(time.monotonic() - self._idle_s):
                self._at.pop(session, None)
        blocked: set[Seat] = set()
        known = [waiter for waiter in self._waiters if waiter.session in self._at]
        for waiter in known:
            seat = self._at[waiter.session]
            if seat not in blocked and (not seat.requests or seat.used + waiter.tokens <= seat.tokens):
                self._let_in(waiter, seat)
            else:
                blocked.add(seat)
        for waiter in [waiter for waiter in self._waiters if waiter.session not in self._at]:
            # A seat without requests takes any; new sessions leave alone what is kept for idle ones.
            new = self._place(waiter.session)
            if new is None or (new.requests and new.used + new.held + waiter.tokens > new.tokens):
                return
            self._let_in(waiter, new)

    def _let_in(self, waiter: _Waiter, seat: Seat) -> None:
        self._waiters.remove(waiter)
        seat.used += waiter.tokens
        seat.requests += 1
        seat.let_go(waiter.session)
        if self._sticky:
            self._at[waiter.session] = seat
        waiter.turn.set_result(seat)

    def _place(self, session: str) -> Seat | None:
        """Where a new session would go."""
        free = [seat for seat in self._seats if seat.server not in self._draining]
        if not free:
            return None
        if not self._sticky:
            return free[next(self._round) % len(free)]

        def order(seat: Seat) -> tuple[int, int]:
            load = (seat.used + seat.held) * _GRAIN // max(1, seat.tokens)
            return load, -xxhash.xxh3_64_intdigest(f"{session}\0{seat.server}\0{seat.copy}".encode())

        return min(free, key=order)

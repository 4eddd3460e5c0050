"""Who sits where: stickiness, least load, hashing among equals, room, order, leaving."""

import asyncio
from collections import Counter

import pytest

from miles.errors import EngineLost
from miles.rollout.engines.sglang.placement import Placement


def placement_of(*servers, tokens=1000, **settings):
    placement = Placement(**settings)
    for server in servers:
        placement.add(server, tokens)
    return placement


async def where(placement, session, tokens=10):
    async with placement.seat(session, tokens) as seat:
        return seat.server


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Guest:
    """A request that stays until it is told to leave."""

    def __init__(self, placement, session, tokens, **settings):
        self.seat, self._leave = None, asyncio.Event()
        self.task = asyncio.create_task(self._stay(placement, session, tokens, settings))

    async def _stay(self, placement, session, tokens, settings):
        async with placement.seat(session, tokens, **settings) as self.seat:
            await self._leave.wait()

    async def leave(self):
        self._leave.set()
        await self.task


async def test_a_session_stays_and_many_sessions_are_spread():
    placement = placement_of("a", "b", "c")
    first = {f"s{n}": await where(placement, f"s{n}") for n in range(60)}
    again = {f"s{n}": await where(placement, f"s{n}") for n in range(60)}
    assert first == again
    assert set(Counter(first.values()).values()) <= set(range(10, 31))


async def test_processes_that_know_nothing_of_each_other_choose_alike():
    names = [f"s{n}" for n in range(30)]
    one = [await where(placement_of("a", "b", "c"), name) for name in names]
    other = [await where(placement_of("c", "a", "b"), name) for name in names]
    assert one == other
    without = [await where(placement_of("a", "b"), name) for name in names]
    assert [x for x, y in zip(one, without, strict=True) if x != "c" and x != y] == []


async def test_a_new_session_goes_to_the_least_loaded_seat():
    placement = placement_of("a", "b")
    guest = Guest(placement, "big", 600)
    await settle()
    assert {await where(placement, f"s{n}") for n in range(5)} == {"a", "b"} - {guest.seat.server}
    await guest.leave()


async def test_a_request_waits_for_room_and_sessions_under_way_come_first():
    placement = placement_of("a")
    await where(placement, "old", 100)
    big = Guest(placement, "big", 900)
    await settle()
    new, old = Guest(placement, "new", 200), Guest(placement, "old", 200)
    await settle()
    assert (new.seat, old.seat, placement.waiting) == (None, None, 2)
    await big.leave()
    await settle()
    assert old.seat is not None
    assert new.seat is None  # "big" may come back for what it has in the cache
    placement.release("big")
    await settle()
    assert new.seat is not None
    await old.leave()
    await new.leave()


async def test_an_idle_sessions_claim_runs_out():
    placement = placement_of("a", idle_s=0.05)
    await where(placement, "idle", 900)
    guest, new = Guest(placement, "other", 50), Guest(placement, "new", 200)
    async with asyncio.timeout(5):
        while new.seat is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await guest.leave()
    await new.leave()


async def test_one_that_is_larger_than_the_cache_gets_an_empty_seat():
    assert await where(placement_of("a"), "huge", 5000) == "a"


async def test_draining_and_removing():
    placement = placement_of("a", "b")
    sticky = {f"s{n}": await where(placement, f"s{n}") for n in range(20)}
    placement.drain("a")
    assert {await where(placement, f"new{n}") for n in range(10)} == {"b"}
    assert {session: await where(placement, session) for session in sticky} == sticky
    placement.remove("a")
    assert {await where(placement, session) for session in sticky} == {"b"}


async def test_without_servers_requests_wait_for_one_and_no_longer_than_they_may():
    placement = Placement()
    guest = Guest(placement, "s", 10)
    with pytest.raises(EngineLost, match=r"no engine had room .* take requests: none"):
        async with placement.seat("t", 10, limit_s=0.05):
            pass
    placement.add("a", 100)
    await settle()
    assert guest.seat.server == "a"
    await guest.leave()
    placement.give_up("all is lost")
    with pytest.raises(EngineLost, match="all is lost"):
        await where(placement, "u")


async def test_a_cancelled_request_leaves_nothing_behind():
    placement = placement_of("a")
    big = Guest(placement, "big", 1000)
    await settle()
    waiting, leaving = Guest(placement, "w", 1000), Guest(placement, "l", 1000)
    await settle()
    leaving.task.cancel()
    await settle()
    big._leave.set()
    await big.task
    placement.release("big")
    waiting.task.cancel()  # let in, and cancelled before it knows
    await asyncio.gather(waiting.task, leaving.task, return_exceptions=True)
    placement.release("w")
    (seat,) = placement.seats()
    assert (seat.used, seat.held, seat.requests, placement.waiting) == (0, 0, 0, 0)


async def test_without_stickiness_servers_take_turns():
    placement = placement_of("a", "b", sticky=False)
    assert [await where(placement, "s") for _ in range(4)] == ["a", "b", "a", "b"]

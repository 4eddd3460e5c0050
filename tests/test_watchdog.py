import asyncio
import time

from miles.watchdog import watched_loop


def blocking_score():
    time.sleep(0.4)


async def test_code_that_blocks_the_loop_is_named_once(caplog):
    async with watched_loop(patience_s=0.1):
        await asyncio.sleep(0.05)
        blocking_score()
        await asyncio.sleep(0.05)
    (record,) = [r for r in caplog.records if r.name == "miles.watchdog"]
    assert "blocked for" in record.getMessage()
    assert "in blocking_score" in record.getMessage()


async def test_a_loop_that_turns_is_left_alone(caplog):
    async with watched_loop(patience_s=0.2):
        for _ in range(10):
            await asyncio.sleep(0.03)
    assert [r for r in caplog.records if r.name == "miles.watchdog"] == []

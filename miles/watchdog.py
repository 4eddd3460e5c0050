"""Tells when foreign code blocks the event loop: everything stands still then, and the culprit should be named."""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator

__all__ = ["watched_loop"]

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def watched_loop(patience_s: float = 10.0) -> AsyncIterator[None]:
    """Inside the block, log the main stack once whenever the loop does not turn for `patience_s`."""
    thread, beat, ended = threading.get_ident(), time.monotonic(), threading.Event()

    async def heart() -> None:
        nonlocal beat
        while True:
            beat = time.monotonic()
            await asyncio.sleep(patience_s / 10)

    def watch() -> None:
        told = 0.0
        while not ended.wait(patience_s / 10):
            if time.monotonic() - beat > patience_s and told != beat:
                told = beat
                stack = "".join(traceback.format_stack(sys._current_frames()[thread])[-6:])
                log.warning(
                    "the event loop has been blocked for %.0f s, no episode goes on: move blocking work of a score, "
                    "step or agent to asyncio.to_thread. It stands here:\n%s",
                    time.monotonic() - beat,
                    stack,
                )

    beating = asyncio.create_task(heart())
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        beating.cancel()
        await asyncio.to_thread(watcher.join)

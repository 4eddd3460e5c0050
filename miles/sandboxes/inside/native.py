"""Commands by a provider's own means, for images without Python: what the process inside would have done, with `sh`."""

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from miles.sandboxes.base import ExecResult
from miles.sandboxes.children import Capture

__all__ = ["END_ALL", "run_native"]

_KILL = """
n=0; left=1
while [ "$left" = 1 ] && [ "$n" -lt 50 ]; do
    left=0; n=$((n + 1))
    for p in /proc/[0-9]*; do
        if grep -qs "MILES_EXEC=$1" "$p/environ"; then kill -9 "${p#/proc/}" 2>/dev/null && left=1; fi
    done
done
"""
END_ALL = """
n=0
while [ "$n" -lt 5 ]; do
    n=$((n + 1))
    for p in /proc/[0-9]*; do
        q=${p#/proc/}; [ "$q" = 1 ] || [ "$q" = $$ ] || kill -9 "$q" 2>/dev/null
    done
done
"""
"""A script that ends every process inside but the first one and its own."""
_numbers = itertools.count()


class Plain(Protocol):
    """A command to its end, its outputs handed on as (1 or 2, bytes); its exit code."""

    async def __call__(self, argv: Sequence[str], output: Callable[[int, bytes], None], **settings: Any) -> int: ...


async def run_native(
    plain: Plain, upload: Callable[[str, bytes], Awaitable[None]], argv: Sequence[str], **settings: Any
) -> ExecResult:
    """One command; killed with all that carries its mark at the timeout, and when the caller is cancelled."""
    mark = f"{os.getpid()}.{next(_numbers)}"
    captures = {number: Capture(settings.get("max_output", 1 << 20)) for number in (1, 2)}
    facts: dict[str, Any] = {"environment": {**settings.get("env", {}), "MILES_EXEC": mark}}
    facts |= {
        name: value for name, value in (("workdir", settings.get("cwd")), ("user", settings.get("user"))) if value
    }
    argv = list(argv)
    if data := settings.get("stdin", b""):
        await upload(f"/tmp/.miles-{mark}", data)
        argv = ["/bin/sh", "-c", 'f=$0; exec < "$f"; rm -f "$f"; exec "$@"', f"/tmp/.miles-{mark}", *argv]
    began = time.monotonic()

    def take(number: int, data: bytes) -> None:
        captures[number].feed(data)

    async def kill() -> None:
        await plain(["/bin/sh", "-c", _KILL, "sh", mark], lambda number, data: None)

    timed_out, status = False, None
    try:
        async with asyncio.timeout(settings["timeout_s"]):
            status = await plain(argv, take, **facts)
    except TimeoutError:
        timed_out = True
        await kill()
    except asyncio.CancelledError:
        await asyncio.shield(kill())
        raise
    signalled = status in (128 + 9, 128 + 15)
    return ExecResult(
        exit_code=status,
        stdout=captures[1].value(),
        stderr=captures[2].value(),
        outcome="timeout" if timed_out else "signal" if signalled else "exited",
        truncated=any(capture.dropped for capture in captures.values()),
        duration_s=time.monotonic() - began,
    )

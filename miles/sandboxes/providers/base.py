"""What providers with an account or a daemon have in common: whose machine it is, and whom the reaper may judge."""

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from miles.errors import SandboxError, SandboxLost, SandboxUnavailable
from miles.processes import owner_is_dead, owner_mark
from miles.sandboxes.base import Connect, ExecResult, SandboxInfo
from miles.sandboxes.inside.native import run_native

__all__ = ["LABELS", "OWNER", "Provider", "RemoteMachine", "TextQueue", "in_time", "labels_of", "missing"]

T = TypeVar("T")
OWNER, LABELS = "miles-owner", "miles-labels"


class Provider:
    """Base of such backends: `machines` and `remove` are theirs."""

    def __init__(self) -> None:
        self.owner = owner_mark()

    async def machines(self) -> list[SandboxInfo]:
        raise NotImplementedError

    async def remove(self, machine_id: str) -> None:
        """End a machine; one that is gone is no error."""
        raise NotImplementedError

    def labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """What the provider is asked to remember."""
        return {OWNER: self.owner, LABELS: json.dumps(dict(labels))}

    async def reap(self) -> int:
        """Destroy what dead owners left behind; returns how many. Who is dead is asked after they were listed."""
        orphans = [info.id for info in await self.machines() if owner_is_dead(info.owner)]
        done = await asyncio.gather(*map(self.remove, orphans), return_exceptions=True)
        return sum(result is None for result in done)


class RemoteMachine:
    """What a machine of a provider is like unless it says otherwise: to be reached through what it carries, only."""

    text = False
    has_workdir = False
    python = ""
    code = b""
    native_first = 0
    env: Mapping[str, str] = MappingProxyType({})

    async def _plain(self, argv: Sequence[str], output: Any, **settings: Any) -> int:
        """A command to its end by the provider's own means; `output` takes (1 or 2, bytes). Returns its exit code."""
        raise NotImplementedError

    async def _upload(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    async def run(self, argv: Sequence[str], **settings: Any) -> ExecResult:
        return await run_native(self._plain, self._upload, argv, **settings)

    async def end_all(self) -> bool:
        return False

    def oom_kills(self) -> int | None:
        return None

    async def listen(self, connect: Connect, port: int) -> tuple[asyncio.Server, int] | None:
        return None

    async def keepalive(self, ttl_s: float) -> None:
        return None  # the time was told at its creation, and stays


def labels_of(told: Mapping[str, str]) -> dict[str, str]:
    """Our labels in what a provider remembers."""
    try:
        found = json.loads(told.get(LABELS) or "{}")
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


async def in_time(work: Awaitable[T], what: str, limit_s: float = 60.0) -> T:
    """Await an SDK, which may have no deadline of its own. SandboxLost when it does not answer."""
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError as error:
        raise SandboxLost(f"{what}: no answer for {limit_s:g} s") from error


class TextQueue:
    """Outputs that an SDK hands to callbacks, as a pipe's reading side."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[bytes] = asyncio.Queue()
        self._over = False

    def feed(self, text: str | bytes) -> None:
        if data := text.encode() if isinstance(text, str) else text:
            self._parts.put_nowait(data)

    def end(self, *_: Any) -> None:
        self._parts.put_nowait(b"")

    async def read(self) -> bytes:
        """Empty from the end on."""
        if self._over:
            return b""
        data = await self._parts.get()
        self._over = not data
        return data


def missing(package: str, extra: str, error: ImportError) -> SandboxError:
    """What to install."""
    return SandboxUnavailable(f"the {extra} backend needs {package}: pip install 'miles-hub[{extra}]' ({error})")

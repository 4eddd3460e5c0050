"""One interface for every provider of isolated machines.

What a command does is a value (`ExecResult`: non-zero exit, timeout, out of memory, cut output).
What the provider does wrong is an exception of `SandboxError` with `.retryable`.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

__all__ = [
    "Backend",
    "Capabilities",
    "Connect",
    "ExecResult",
    "Image",
    "Process",
    "Resources",
    "Sandbox",
    "SandboxInfo",
    "SandboxSpec",
]

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Opens a connection on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a sandbox begins with: exactly one of these.

    `ref`: a name that the provider knows (an OCI image, a template). `dockerfile`: a folder with a Dockerfile, built
    when its content has not been built before. `rootfs`: a directory, or a tarball of one. `snapshot`: what
    `Sandbox.snapshot` gave.
    """

    ref: str = ""
    dockerfile: Path | None = None
    rootfs: Path | None = None
    snapshot: str = ""

    @property
    def kind(self) -> str:
        """The name of the field that is set. ValueError when none or several are."""
        kinds = [name for name in ("ref", "dockerfile", "rootfs", "snapshot") if getattr(self, name)]
        if len(kinds) != 1:
            raise ValueError(f"an image is one of ref, dockerfile, rootfs and snapshot, not {kinds or 'nothing'}")
        return kinds[0]

    def digest(self) -> str:
        """16 hex digits that change with what the image is made of (a rootfs: with its path and time)."""
        found = hashlib.sha256(self.kind.encode())
        if self.dockerfile is not None:
            for path in sorted(self.dockerfile.rglob("*")):
                found.update(f"\0{path.relative_to(self.dockerfile)}\0{path.lstat().st_mode:o}\0".encode())
                if path.is_symlink():
                    found.update(str(path.readlink()).encode())
                elif path.is_file():
                    found.update(hashlib.sha256(path.read_bytes()).digest())
        elif self.rootfs is not None:
            facts = self.rootfs.stat()
            found.update(f"{self.rootfs.resolve()}\0{facts.st_mtime_ns}\0{facts.st_size}".encode())
        else:
            found.update((self.ref or self.snapshot).encode())
        return found.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Limits of one sandbox. How hard they are is the backend's `Capabilities.limits`."""

    memory_mib: int = 512
    pids: int = 128
    disk_mib: int = 64
    cpus: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What to make. `files` maps absolute paths to contents, written before anything runs.

    `labels` say whose machine it is; they are kept where the provider can show them (for `local`: the
    environment of the outer process), beside the owner's tag that the reaper goes by. A provider ends the machine by
    itself `ttl_s` after its creation, where it can, in case nobody does.
    """

    image: Image | None = None
    """None: the backend's default."""
    workdir: str = "/workspace"
    files: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Folders of this host that are seen inside, read-only, by the path they have there."""
    resources: Resources = field(default_factory=Resources)
    network: Literal["none", "full"] = "none"
    user: str = ""
    """Who commands run as; empty: the image's own."""
    labels: Mapping[str, str] = field(default_factory=dict)
    ttl_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do on this host, found out by probing."""

    isolation: Literal["none", "process", "container", "microvm"]
    network_none: bool
    limits: Literal["none", "best_effort", "hard"]
    network_full: bool = False
    background_processes: bool = True
    images: tuple[str, ...] = ()
    """Kinds of `Image` that it takes."""
    streams: bool = True
    """`spawn`, `forward` and `reach`."""
    mounts: bool = False
    """Folders of this host inside."""
    users: bool = False
    snapshot: bool = False
    ttl: bool = False
    """Whether machines end by themselves."""
    least_ttl_s: float = 1.0
    notes: tuple[str, ...] = ()

    def lacks(self, spec: SandboxSpec) -> str:
        """Why a sandbox like `spec` cannot be had here; empty when it can."""
        kind = spec.image.kind if spec.image is not None else ""
        isolated = self.isolation != "none"  # else whoever allowed that has allowed the rest
        wants = [
            (kind and kind not in self.images, f"images of kind {kind}"),
            (isolated and spec.network == "none" and not self.network_none, "switching the network off"),
            (spec.network == "full" and not self.network_full, "network access"),
            (bool(spec.user) and not self.users, "commands of another user"),
            (bool(spec.mounts) and not self.mounts, "folders of this host inside"),
        ]
        return ", ".join(what for wanted, what in wants if wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. `exit_code` is None unless it exited by itself; outputs are raw bytes."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    outcome: Literal["exited", "timeout", "oom", "signal"]
    truncated: bool
    duration_s: float

    @property
    def text(self) -> str:
        """Both outputs as text, bytes that are not UTF-8 replaced."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


class Process(Protocol):
    """A command that was left running."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        ...

    def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """("stdout" or "stderr", bytes) as they come, until the end. What is not taken holds the command up."""
        ...

    async def write(self, data: bytes) -> None:
        """To its standard input."""
        ...

    async def end_input(self) -> None:
        """Close its standard input."""
        ...

    async def kill(self, value: int = 9) -> None:
        """Send a signal to it and all that it started."""
        ...

    async def wait(self) -> int:
        """Its exit code; outputs that nobody took are left out."""
        ...


class Sandbox(Protocol):
    """One live machine, for one episode."""

    @property
    def id(self) -> str: ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output: int = 1 << 20,
    ) -> ExecResult:
        """Run a command (text goes to `sh -c`), kill it and all it started at the timeout.

        `max_output` bounds each stream: head and tail are kept, with a mark between.
        Raises SandboxLost when the machine is gone, ValueError for a timeout that is not a positive number.
        """
        ...

    async def spawn(
        self, command: str | Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a command and leave it running. SandboxError where `Capabilities.streams` is false."""
        ...

    async def read(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        """A file's content; FileNotFoundError, or ValueError when it is larger than `max_bytes`."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making its folders."""
        ...

    async def forward(self, port: int) -> int:
        """A port of this host's loopback, every connection to which reaches `port` inside."""
        ...

    async def reach(self, connect: Connect, port: int = 0) -> int:
        """A port inside (0: a free one), every connection to which reaches what `connect` opens on this host: how an
        agent without a network talks to its model."""
        ...

    async def snapshot(self) -> Image:
        """The file system as it is, to begin other sandboxes with. SandboxError where that cannot be had."""
        ...

    async def keepalive(self, ttl_s: float) -> None:
        """Let the machine live `ttl_s` from now on, where its provider can change that."""
        ...

    async def quiesce(self) -> None:
        """End every process that earlier commands left running, so that scoring meets no live agent."""
        ...

    async def destroy(self) -> None:
        """End every process and free everything. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """A machine as its provider lists it."""

    id: str
    owner: str
    """Mark of the process that made it (`miles.processes.owner_mark`)."""
    age_s: float
    labels: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """A provider. Made once per run."""

    name: str

    async def probe(self) -> Capabilities:
        """What works here; SandboxUnavailable with instructions when nothing does."""
        ...

    async def prepare(self, image: Image) -> None:
        """Have an image ready, so that creation is quick. The pool asks once for each digest. SandboxError."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Return when commands run. Raises SandboxCreateFailed."""
        ...

    async def machines(self) -> list[SandboxInfo]:
        """All machines that Miles made here or in this account, whoever owns them."""
        ...

    async def reap(self) -> int:
        """Destroy what dead owners left behind; returns how many."""
        ...

    async def close(self) -> None:
        """Let go of clients and connections."""
        ...

"""One interface for every provider of isolated machines.

What a command does is a value (`ExecResult`: non-zero exit, timeout, out of memory, cut output).
What the provider does wrong is an exception of `SandboxError` with `.retryable`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

__all__ = ["Backend", "Capabilities", "ExecResult", "Resources", "Sandbox", "SandboxSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Limits of one sandbox. How hard they are is the backend's `Capabilities.limits`."""

    memory_mib: int = 512
    pids: int = 128
    disk_mib: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What to make. `files` maps absolute paths to contents, written before anything runs.

    `labels` say whose machine it is; they are kept where the provider can show them (for `local`: the
    environment of the outer process), beside the owner's tag that the reaper goes by.
    """

    workdir: str = "/workspace"
    files: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    network: Literal["none", "full"] = "none"
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do on this host, found out by probing."""

    isolation: Literal["none", "process", "container", "microvm"]
    network_none: bool
    limits: Literal["none", "best_effort", "hard"]
    background_processes: bool = True
    notes: tuple[str, ...] = ()


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

    async def read(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        """A file's content; FileNotFoundError, or ValueError when it is larger than `max_bytes`."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making its folders."""
        ...

    async def quiesce(self) -> None:
        """End every process that earlier commands left running, so that scoring meets no live agent."""
        ...

    async def destroy(self) -> None:
        """End every process and free everything. Safe to call twice."""
        ...


class Backend(Protocol):
    """A provider. Made once per run."""

    name: str

    async def probe(self) -> Capabilities:
        """What works here; SandboxUnavailable with instructions when nothing does."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Return when commands run. Raises SandboxCreateFailed."""
        ...

    async def reap(self) -> int:
        """Destroy what dead owners left behind; returns how many."""
        ...

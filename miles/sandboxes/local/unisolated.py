"""Plain host processes in a temporary folder: no isolation at all, only on an explicit wish."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles.errors import SandboxError
from miles.processes import owner_mark, scratch_folder
from miles.sandboxes.base import Connect, ExecResult, Image, Process, SandboxSpec
from miles.sandboxes.children import Child, check_timeout, finished
from miles.sandboxes.local.reaper import processes_with
from miles.sandboxes.netns import serve_inside

__all__ = ["UnisolatedSandbox"]

_PLAIN = "plain processes have no streams and no snapshots: choose a backend that isolates"


class UnisolatedSandbox:
    """Runs commands as the current user. The work directory stands for `spec.workdir`."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._root = scratch_folder("sandbox")
        self._mark = self._root.name
        self._servers: list[asyncio.Server] = []
        for path, data in spec.files.items():
            target = self._host(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    @property
    def id(self) -> str:
        return self._mark

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
        check_timeout(timeout_s)
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        variables = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self._root),
            **self._spec.env,
            **(env or {}),
        }
        variables |= {"MILES_OWNER": owner_mark(), "MILES_EXEC": self._mark}
        began = time.monotonic()
        folder = str(self._host(cwd) if cwd else self._root)
        child = Child(argv, env=variables, stdin=stdin, limit=max_output, cwd=folder)
        timed_out, status = False, -signal.SIGKILL
        try:
            status = await asyncio.wait_for(child.wait(), timeout_s)
        except TimeoutError:
            timed_out = True
        finally:
            if child.running:
                self._kill_all()
                child.kill()
                await asyncio.shield(child.wait())
            child.close()
        return finished(child, status, timed_out=timed_out, oom=False, began=began)

    async def read(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        data = self._host(path).read_bytes()
        if len(data) > max_bytes:
            raise ValueError(f"{path} is larger than {max_bytes} bytes")
        return data

    async def write(self, path: str, data: bytes) -> None:
        target = self._host(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def spawn(
        self, command: str | Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        raise SandboxError(_PLAIN)

    async def forward(self, port: int) -> int:
        return port

    async def reach(self, connect: Connect, port: int = 0) -> int:
        server, port = await serve_inside([], connect, port)
        self._servers.append(server)
        return port

    async def keepalive(self, ttl_s: float) -> None:
        return None

    async def snapshot(self) -> Image:
        raise SandboxError(_PLAIN)

    async def quiesce(self) -> None:
        self._kill_all()

    async def destroy(self) -> None:
        for server in self._servers:
            server.close()
        self._kill_all()
        shutil.rmtree(self._root, ignore_errors=True)

    def _host(self, path: str) -> Path:
        return self._root / path.removeprefix(self._spec.workdir).lstrip("/")

    def _kill_all(self) -> None:
        for pid in processes_with(f"MILES_EXEC={self._mark}"):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

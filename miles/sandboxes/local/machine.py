"""One bubblewrap sandbox: how commands enter it, and how everything in it ends."""

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.errors import SandboxError, SandboxLost
from miles.processes import owner_mark
from miles.sandboxes.base import Connect, ExecResult, Image, SandboxSpec
from miles.sandboxes.children import Child, ChildPipe, finished
from miles.sandboxes.local.cgroups import Cgroup
from miles.sandboxes.local.reaper import processes_with
from miles.sandboxes.local.rootfs import Root, Writable, save
from miles.sandboxes.netns import serve_inside

__all__ = ["HOST_PYTHON", "PATH", "LocalMachine", "Places"]

HOST_PYTHON = "/usr/bin/python3"
"""The host's programs are the sandbox's."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_JOIN = 'ulimit -c 0; for d in $1; do echo $$ > "$d/cgroup.procs" || exit 125; done; shift; exec "$@"'
_BEST_EFFORT = 'ulimit -c 0; ulimit -v "$1"; ulimit -f "$2"; shift 2; exec "$@"'
_WITH = '. "$0"; exec "$@"'
_NAME, _QUOTE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "'\\''"
_TICKS = os.sysconf("SC_CLK_TCK")
_NS_GET_PARENT = 0xB702
_counter = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where one sandbox's files and limits are."""

    root: Root
    writable: Writable | None
    group: Cgroup | None
    code: bytes
    """The program inside, for the host's Python; empty where that has none."""


class LocalMachine:
    """One bubblewrap sandbox."""

    text = False
    native_first = 4  # most episodes of a few commands need no process inside

    def __init__(
        self, name: str, spec: SandboxSpec, outer: Child, init_pid: int, nsenter: Sequence[str], places: Places
    ) -> None:
        self._name, self._spec, self._outer = name, spec, outer
        self._root, self._writable, self._group = places.root, places.writable, places.group
        self._init_pid = init_pid
        self._init = os.pidfd_open(init_pid)
        self._namespace = os.readlink(f"/proc/{init_pid}/ns/pid")  # noqa: PTH115
        self._fds: tuple[int, ...] = ()
        spaces = ("-t", str(init_pid), "-m", "-p", "-n", "-i", "-u", "-r", "-w", "--preserve-credentials", "--")
        network = ("-t", str(init_pid), "-n", "--preserve-credentials", "--")
        if os.stat(f"/proc/{init_pid}").st_uid == 0:  # noqa: PTH116
            self._enter = [*nsenter, "-U", *spaces]
            self._enter_network = [*nsenter, "-U", *network]
        else:
            # bwrap nests two user namespaces (to mount devpts it must be root in the outer one). Only the outer
            # one owns the other namespaces, so an ordinary user enters it first and the inner one from inside.
            self._fds = (_outer_userns(init_pid),)
            inner = (nsenter[-1], "--user=/proc/1/ns/user", "--preserve-credentials", "--")
            self._enter = [*nsenter, f"--user=/proc/self/fd/{self._fds[0]}", *spaces, *inner]
            self._enter_network = [*nsenter, f"--user=/proc/self/fd/{self._fds[0]}", *network]
        self._session = Path(f"/proc/{init_pid}/stat").read_text().rpartition(")")[2].split()[3]
        self._destroyed = False
        self._running: set[str] = set()
        self.env: Mapping[str, str] = dict(places.root.env)
        self.has_workdir = not places.root.lowers
        self.python = "" if self._root.lowers or not places.code else HOST_PYTHON
        self.code = places.code if self.python else b""

    @property
    def id(self) -> str:
        return self._name

    async def open(self, argv: Sequence[str]) -> ChildPipe:
        self._refuse_if_lost()
        command = [*self._limited(), *self._enter, *argv]
        return await ChildPipe(command, env=self._outer_env(f"{self._name}.inside"), pass_fds=self._fds).start()

    async def run(self, argv: Sequence[str], **settings: Any) -> ExecResult:
        self._refuse_if_lost()
        if settings.get("user"):
            raise SandboxError("the local backend has one user only")
        timeout_s, cwd = settings["timeout_s"], settings.get("cwd")
        mark = f"{self._name}.{next(_counter)}"
        if cwd is not None:
            argv = ["/bin/sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", cwd, *argv]
        ooms = self.oom_kills() or 0
        began, since = time.monotonic(), int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)
        variables = _exports({**self.env, **settings.get("env", {})})
        try:
            child = Child(
                [*self._limited(), *self._enter, "/bin/sh", "-c", _WITH, f"/proc/self/fd/{variables}", *argv],
                env=self._outer_env(mark),
                stdin=settings.get("stdin", b""),
                limit=settings.get("max_output", 1 << 20),
                pass_fds=(*self._fds, variables),
            )
        finally:
            os.close(variables)
        timed_out = False
        self._running.add(mark)
        beside = len(self._running) > 1
        try:
            try:
                status = await asyncio.wait_for(child.wait(), timeout_s)
            except TimeoutError:
                timed_out, status = True, -signal.SIGKILL
        finally:
            beside = beside or len(self._running) > 1
            self._running.discard(mark)
            if child.running:
                await asyncio.shield(self._kill(child, mark, None if beside else since))
            child.close()
        self._refuse_if_lost()
        oom = (self.oom_kills() or 0) > ooms
        return finished(child, status, timed_out=timed_out, oom=oom, began=began)

    async def alive(self) -> bool:
        return not self._lost()

    def oom_kills(self) -> int | None:
        return self._group.oom_kills() if self._group is not None else None

    async def end_all(self) -> bool:
        while pids := await asyncio.to_thread(self._commands):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.002)
        return True

    def _commands(self, since: int = 0) -> list[int]:
        """All of the namespace but its init and what that has started. What leads in from outside ends by itself, and
        reaps what it led in: killed, it would leave that to an init that may not."""
        found = []
        for pid in processes_with(None, self._namespace):
            with contextlib.suppress(OSError):
                told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                own = pid == self._init_pid or (int(told[1]) == self._init_pid and told[3] == self._session)
                if not own and int(told[19]) >= since:
                    found.append(pid)
        return found

    async def unpack(self, packed: bytes) -> None:
        """Unpack a snapshot's files. SandboxCreateFailed when they do not fit."""
        done = await self.run(["tar", "-C", "/", "-xf", "-"], stdin=packed, timeout_s=120.0)
        if done.exit_code != 0:
            raise SandboxError(f"a snapshot could not be unpacked: {done.stderr.decode(errors='replace')[-300:]}")

    async def listen(self, connect: Connect, port: int) -> tuple[asyncio.Server, int] | None:
        return await serve_inside(self._enter_network, connect, port, self._fds)

    async def keepalive(self, ttl_s: float) -> None:
        return None  # it lives as long as this process

    async def snapshot(self) -> Image:
        if self._writable is not None:
            return await asyncio.to_thread(save, self._root, self._writable, None)
        folders = [path.strip("/") for path in ("/tmp", self._spec.workdir)]
        most = self._spec.resources.disk_mib << 22
        packed = await self.run(["tar", "-C", "/", "-cf", "-", *folders], timeout_s=120.0, max_output=most)
        if packed.exit_code != 0 or packed.truncated:
            raise SandboxError(f"sandbox {self._name} could not be packed: {packed.stderr.decode(errors='replace')}")
        return await asyncio.to_thread(save, self._root, None, packed.stdout)

    async def destroy(self) -> None:
        if self._destroyed:
            await self._clean_up()
            return
        self._destroyed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        try:  # the outer bwrap reaps the init and ends by itself; killing it first could leave the init behind
            await asyncio.wait_for(self._outer.wait(), 1)
        except TimeoutError:
            self._outer.kill()
            await self._outer.wait()
        self._outer.close()
        for fd in (self._init, *self._fds):
            os.close(fd)
        await self._clean_up()

    async def _clean_up(self) -> None:
        if self._writable is not None:
            await asyncio.to_thread(self._writable.remove)
        if self._group is not None:
            self._group.kill()
            if not self._group.remove():
                raise SandboxError(f"control group {self._group.folders} could not be removed")

    def _limited(self) -> list[str]:
        resources = self._spec.resources
        if self._group is not None:
            return ["/bin/sh", "-c", _JOIN, "sh", " ".join(str(folder) for folder in self._group.folders)]
        blocks = str(resources.disk_mib * 2048)
        return ["/bin/sh", "-c", _BEST_EFFORT, "sh", str(resources.memory_mib << 10), blocks]

    def _outer_env(self, mark: str) -> dict[str, str]:
        """Of the programs of this host that lead inside: nothing of an image or a task, which could load code into
        them."""
        home = "/root" if self._root.lowers else self._spec.workdir
        base = {"PATH": PATH, "HOME": home, "LANG": "C.UTF-8", "TERM": "dumb"}
        return {**base, "MILES_OWNER": owner_mark(), "MILES_EXEC": mark}

    def _lost(self) -> bool:
        gone = not os.path.exists(f"/proc/{self._init_pid}/ns/pid")  # noqa: PTH110
        return self._destroyed or not self._outer.running or gone

    def _refuse_if_lost(self) -> None:
        if self._lost():
            raise SandboxLost(f"sandbox {self._name} is gone; the episode starts again in a fresh one")

    async def _kill(self, child: Child, mark: str, since: int | None) -> None:
        """Kill a command and everything it started, also what left its session; repeat until none is left. `since`:
        nothing else has been started from then on (ticks since boot), so that is its, too, whatever it made of its
        environment."""
        child.kill()
        for _ in range(50):
            pids = set(await asyncio.to_thread(processes_with, f"MILES_EXEC={mark}", self._namespace))
            if since is not None:
                pids |= set(await asyncio.to_thread(self._commands, since))
            if not pids:
                break
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            await asyncio.sleep(0.01)
        await child.wait()


def _exports(env: Mapping[str, str]) -> int:
    """A file in memory that a shell inside reads its variables from: arguments are seen by everybody."""
    lines = [
        f"export {name}='{value.replace(chr(39), _QUOTE)}'\n" for name, value in env.items() if _NAME.fullmatch(name)
    ]
    fd = os.memfd_create("variables", 0)
    os.write(fd, "".join(lines).encode("utf-8", "surrogateescape"))
    return fd


def _outer_userns(pid: int) -> int:
    """A file descriptor of the parent of a process's user namespace (ioctl_ns(2), NS_GET_PARENT)."""
    inner = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    try:
        return fcntl.ioctl(inner, _NS_GET_PARENT)
    finally:
        os.close(inner)

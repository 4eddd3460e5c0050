"""Hard limits where a control-group tree is writable: version 2, or version 1 (memory and pids)."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from miles.processes import owner_is_dead
from miles.sandboxes.base import Resources

__all__ = ["Cgroup", "cgroup_root", "make_cgroup", "reap_cgroups"]

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """The folders of one sandbox's group; processes join by writing to each folder's cgroup.procs."""

    folders: tuple[Path, ...]

    def oom_kills(self) -> int:
        """How often the kernel killed for memory in this group."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                path = folder / name
                if path.exists():
                    fields = dict(line.split() for line in path.read_text().splitlines())
                    return int(fields.get("oom_kill", 0))
        return 0

    def members(self) -> set[int]:
        """Processes in this group."""
        return {int(pid) for folder in self.folders for pid in (folder / "cgroup.procs").read_text().split()}

    def kill(self) -> None:
        """SIGKILL every member."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                if (folder / "cgroup.kill").exists():
                    (folder / "cgroup.kill").write_text("1")
                for pid in (folder / "cgroup.procs").read_text().split():
                    if pid != "0":  # a process that cannot be seen from here
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(pid), 9)

    def remove(self) -> bool:
        """Delete the folders; members may need a moment to vanish."""
        for folder in self.folders:
            for _ in range(20):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    self.kill()
                    time.sleep(0.005)
                else:
                    break
        return not any(folder.exists() for folder in self.folders)


def cgroup_root() -> tuple[Path, ...]:
    """Folders under which groups can be made here; empty when none is writable."""
    v2 = _ROOT / "cgroup.controllers"
    if v2.exists() and {"memory", "pids"} <= set((_ROOT / "cgroup.subtree_control").read_text().split()):
        candidates = [_ROOT / "miles"]
    else:
        candidates = [_ROOT / "memory" / "miles", _ROOT / "pids" / "miles"]
    try:
        for folder in candidates:
            folder.mkdir(exist_ok=True)
            if folder.parent == _ROOT:
                (folder / "cgroup.subtree_control").write_text("+memory +pids")
            probe = folder / f"probe-{os.getpid()}"  # the folder may be another user's
            probe.mkdir()
            probe.rmdir()
    except OSError:
        return ()
    return tuple(candidates)


def make_cgroup(roots: tuple[Path, ...], name: str, resources: Resources) -> Cgroup:
    """A group with limits; OSError when the kernel refuses."""
    folders = tuple(root / name for root in roots)
    for folder in folders:
        folder.mkdir()
        limits = {
            "memory.max": resources.memory_mib << 20,
            "memory.limit_in_bytes": resources.memory_mib << 20,
            "pids.max": resources.pids,
        }
        for file, value in limits.items():
            if (folder / file).exists():
                (folder / file).write_text(str(value))
    return Cgroup(folders)


def reap_cgroups(roots: tuple[Path, ...]) -> None:
    """Remove groups whose owner (the part of the name before the first dot) is dead."""
    for root in roots:
        for folder in root.iterdir() if root.exists() else ():
            if folder.is_dir() and owner_is_dead(folder.name.partition(".")[0]):
                group = Cgroup((folder,))
                group.kill()
                group.remove()

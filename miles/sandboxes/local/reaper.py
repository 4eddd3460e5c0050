"""Finds and ends what dead owners left behind, without a ledger: every process carries its owner's tag.

The race that needs
this: a bwrap killed while it starts can leave its inner process behind for good, because the kernel's
parent-death signal was not armed yet.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from miles.processes import owner_is_dead
from miles.sandboxes.base import SandboxInfo
from miles.sandboxes.local.cgroups import reap_cgroups

__all__ = ["owned", "processes_with", "reap"]

_PROC = Path("/proc")


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir(_PROC) if name.isdigit())


def processes_with(entry: str | None, namespace: str | None = None) -> list[int]:
    """Live processes whose environment has `entry` ("NAME=value"; None: any), optionally only of one PID namespace."""
    needle, found = b"\0" + (entry or "").encode() + b"\0", []
    for pid in _pids():
        try:
            if namespace is not None and os.readlink(f"/proc/{pid}/ns/pid") != namespace:  # noqa: PTH115
                continue
            if entry is None:
                if "\nState:\tZ" not in (_PROC / str(pid) / "status").read_text():
                    found.append(pid)
            elif needle in b"\0" + (_PROC / str(pid) / "environ").read_bytes():
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def reap(cgroups: tuple[Path, ...]) -> int:
    """Kill every process whose owner is dead, namespace inits first; remove their control groups."""
    orphans: list[tuple[bool, int]] = []
    for pid in _pids():
        try:
            environ = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            owner = next((e[12:].decode() for e in environ if e.startswith(b"MILES_OWNER=")), None)
            if owner is not None and owner_is_dead(owner):
                orphans.append((not _is_init(pid), pid))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    for _, pid in sorted(orphans):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    reap_cgroups(cgroups)
    return len(orphans)


def owned() -> list[SandboxInfo]:
    """Local sandboxes that live, by the outer process of each."""
    found = []
    for pid in _pids():
        try:
            environ = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            told = dict(entry.decode().split("=", 1) for entry in environ if entry.startswith(b"MILES_"))
            if "MILES_LABELS" in told and not _is_init(pid):
                age = time.time() - (_PROC / str(pid)).stat().st_mtime
                labels = json.loads(told["MILES_LABELS"])
                found.append(SandboxInfo(id=str(pid), owner=told["MILES_OWNER"], age_s=age, labels=labels))
        except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
            continue
    return found


def _is_init(pid: int) -> bool:
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) > 2 and line.split()[-1] == "1"
    return False

"""`miles doctor`: what works on this machine, and what to install for the rest."""

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from miles.errors import ConfigError, SandboxError

__all__ = ["checks", "doctor"]

Check = tuple[str, bool, str]
_NEEDED = ("python", "torch", "transformers", "renderers", "local sandbox")


def doctor(options: argparse.Namespace) -> int:
    """Print every check; the status tells whether the quickstart can run."""
    found = list(checks())
    if options.json:
        print(json.dumps([{"name": name, "ok": ok, "detail": detail} for name, ok, detail in found], indent=1))
    else:
        for name, ok, detail in found:
            print(f"{'ok ' if ok else '-- '} {name:18} {detail}")
    missing = [name for name, ok, _ in found if name in _NEEDED and not ok]
    if not options.json:
        print(f"the quickstart needs: {', '.join(missing)}" if missing else "the quickstart can run here")
    return 1 if missing else 0


def checks() -> Iterator[Check]:
    """(name, present, version or what to do) of everything that some part of Miles can use."""
    yield "python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer is needed)"
    for package in ("torch", "transformers", "renderers"):
        yield _package(package, f"pip install '{package}'")
    yield _user_namespaces()
    yield _local_sandbox()
    yield "embedded engine", _installed("torch") and _installed("transformers"), "torch and transformers, on any CPU"
    yield _cuda()
    yield _docker()
    yield _sglang()
    yield _uv()
    for package in ("gymnasium", "aiodocker", "e2b", "modal", "daytona"):
        name, found, detail = _package(package, f"optional: pip install {package}")
        yield f"{name} SDK" if name != "gymnasium" else name, found, detail


def _uv() -> Check:
    from miles.pythons import uv

    tool = uv()
    return (
        "uv",
        tool is not None,
        tool or "optional: pip install 'miles-hub[hub]' (environments are installed by pip without)",
    )


def _sglang() -> Check:
    from miles.rollout.engines.sglang.install import default_python

    try:
        return "sglang", True, f"in {default_python().parent.parent}"
    except ConfigError as error:
        return "sglang", False, f"optional: {error.message}"


def _package(name: str, hint: str) -> Check:
    try:
        return name, True, metadata.version(name)
    except metadata.PackageNotFoundError:
        return name, False, hint


def _installed(name: str) -> bool:
    return _package(name, "")[1]


def _user_namespaces() -> Check:
    path = Path("/proc/sys/user/max_user_namespaces")
    most = int(path.read_text()) if path.exists() else 0
    if most:
        return "user namespaces", True, f"at most {most}"
    return (
        "user namespaces",
        False,
        "none allowed: sysctl -w user.max_user_namespaces=15000 (the local sandbox needs them)",
    )


def _local_sandbox() -> Check:
    from miles.sandboxes.local.backend import LocalBackend

    try:
        capabilities = asyncio.run(LocalBackend().probe())
    except SandboxError as error:
        return "local sandbox", False, str(error)
    return "local sandbox", True, f"isolation {capabilities.isolation}, limits {capabilities.limits}"


def _cuda() -> Check:
    if not Path("/proc/driver/nvidia").exists():
        return "gpu", False, "no NVIDIA driver; everything runs on the CPU"
    return "gpu", True, "NVIDIA driver present"


def _docker() -> Check:
    if shutil.which("docker") is None:
        return "docker engine", False, "optional: install Docker for the docker sandbox"
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not host.startswith("unix://"):
        return "docker engine", True, f"DOCKER_HOST={host} (not asked)"
    host = host.removeprefix("unix://")
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(host)
    except OSError as error:
        return "docker engine", False, f"the client is here, no engine answers at {host} ({error.strerror})"
    return "docker engine", True, host

"""Images that need no registry: busybox alone, and with this machine's Python."""

import os
import shutil
import subprocess
from pathlib import Path

PASSWD = "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n"


def busybox_root(folder: Path) -> Path:
    """A root file system of busybox; FileNotFoundError where it is not installed."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise FileNotFoundError("busybox is not installed (apt-get install busybox-static)")
    for name in ("bin", "etc", "root", "home/agent", "tmp", "usr/bin", "workspace", "proc", "dev"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "tmp").chmod(0o1777)
    (folder / "etc" / "passwd").write_text(PASSWD)
    (folder / "etc" / "group").write_text("root:x:0:\nagent:x:1000:\n")
    shutil.copy(busybox, folder / "bin" / "busybox")
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        if name != "busybox":
            (folder / "bin" / name).symlink_to("busybox")
    return folder


def python_root(folder: Path) -> Path:
    """The same with the system's python3 and what it is linked with."""
    busybox_root(folder)
    python = Path("/usr/bin/python3").resolve()
    version = python.name
    shutil.copy(python, folder / "usr" / "bin" / "python3")
    linked = subprocess.run(["ldd", python], capture_output=True, text=True, check=True).stdout
    modules = list(Path(f"/usr/lib/{version}/lib-dynload").glob("*.so"))
    for module in modules:
        linked += subprocess.run(["ldd", module], capture_output=True, text=True, check=True).stdout
    for word in set(linked.split()):
        if word.startswith("/"):
            target = folder / word.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(word), target)
    left_out = shutil.ignore_patterns("test", "tests", "__pycache__", "idlelib", "config-*", "lib2to3", "ensurepip")
    shutil.copytree(f"/usr/lib/{version}", folder / "usr" / "lib" / version, ignore=left_out, symlinks=True)
    return folder


def add_program(folder: Path, program: Path | str, place: str = "") -> Path:
    """A program of this machine, and what it is linked with, into a root file system; `place`: where, else nowhere."""
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    wanted = {word: word for word in linked.split() if word.startswith("/")}
    for source, inside in (wanted | ({str(program): place} if place else {})).items():
        target = folder / inside.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(os.path.realpath(source), target)
    return folder


def dockerfile(folder: Path, root: Path) -> Path:
    """A folder that builds an image of a root file system."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(root, folder / "root", symlinks=True)
    (folder / "Dockerfile").write_text('FROM scratch\nCOPY root /\nENTRYPOINT ["/bin/false"]\n')
    return folder

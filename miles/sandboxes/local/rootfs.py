"""What a local sandbox's file system is made of: the host's /usr, a directory, a tarball, an OCI image's layers, or a
snapshot of another sandbox; and the layer that one sandbox writes to."""

import contextlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles.errors import SandboxError
from miles.places import miles_home
from miles.processes import scratch_folder
from miles.sandboxes.base import Image

__all__ = ["Root", "Writable", "root_of", "save"]

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Directories, the lowest first; none: the host's /usr. `archive` is unpacked over them."""

    lowers: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    archive: Path | None = None


@dataclass(frozen=True, slots=True)
class Writable:
    """The folders of an overlay's changes; deleted with the sandbox."""

    folder: Path

    @classmethod
    def make(cls) -> "Writable":
        folder = scratch_folder("layer")
        (folder / "upper").mkdir()
        (folder / "work").mkdir()
        return cls(folder)

    @property
    def upper(self) -> Path:
        return self.folder / "upper"

    def remove(self) -> None:
        """Delete what was written; folders without permissions too."""
        _delete(self.folder)


def _delete(folder: Path) -> None:
    """Delete a tree, folders without permissions too; links are never followed."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir():
        for path, _, _ in os.walk(folder, onerror=None):
            Path(path).chmod(0o700)
            for name in os.listdir(path):
                if (below := Path(path) / name).is_dir() and not below.is_symlink():
                    below.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)


def cache() -> Path:
    """Where unpacked images are kept."""
    return miles_home() / "rootfs"


def root_of(image: Image | None) -> Root:
    """Have an image unpacked. SandboxError for what is none."""
    if image is None:
        return Root()
    if image.snapshot:
        folder = Path(image.snapshot)
        if not (folder / "snapshot.json").is_file():
            raise SandboxError(f"there is no snapshot {folder}: snapshots end with the process that made them")
        told = json.loads((folder / "snapshot.json").read_text())
        archive = folder / "files.tar"
        lowers = tuple(Path(path) for path in told["lowers"])
        return Root(lowers=lowers, env=told["env"], archive=archive if archive.exists() else None)
    if image.rootfs is None:
        raise SandboxError(
            f"the local backend takes a rootfs (a directory or a tarball), not a {image.kind}: "
            "choose sandbox.backend=docker"
        )
    if image.rootfs.is_dir():
        return Root(lowers=(image.rootfs.resolve(),))
    if not image.rootfs.is_file():
        raise SandboxError(f"there is no root file system at {image.rootfs}")
    return _unpacked(image.rootfs, image.digest())


def save(root: Root, writable: Writable | None, archive: bytes | None) -> Image:
    """A snapshot: what was there, and what was changed, as a folder that lives as long as this process."""
    folder = scratch_folder("snapshot")
    lowers = list(root.lowers)
    if writable is not None:
        subprocess.run(["cp", "-a", "--reflink=auto", str(writable.upper), str(folder / "upper")], check=True)
        lowers.append(folder / "upper")
    if archive is not None:
        (folder / "files.tar").write_bytes(archive)
    told = {"lowers": [str(path) for path in lowers], "env": dict(root.env)}
    (folder / "snapshot.json").write_text(json.dumps(told))
    return Image(snapshot=str(folder))


def _unpacked(tarball: Path, digest: str) -> Root:
    """A tarball's directory in the cache: made once, whole or not at all."""
    target = cache() / digest
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{digest}.", suffix=".partial", dir=target.parent))
        (partial / "root").mkdir()
        try:
            env = _extract(tarball, partial)
            (partial / "env.json").write_text(json.dumps(env))
            with contextlib.suppress(OSError):  # another process was faster
                partial.rename(target)
        finally:
            _delete(partial)
    return Root(lowers=(target / "root",), env=json.loads((target / "env.json").read_text()))


def _extract(tarball: Path, partial: Path) -> dict[str, str]:
    """Unpack a root file system, or the layers of an OCI or `docker save` archive; the image's environment."""
    try:
        with tarfile.open(tarball) as archive:
            names = set(archive.getnames())
            if "manifest.json" not in names and "./manifest.json" not in names:
                _untar(tarball, partial / "root")
                return {}
        (partial / "image").mkdir()
        _untar(tarball, partial / "image")
        manifest = json.loads((partial / "image" / "manifest.json").read_text())[0]
        for layer in manifest["Layers"]:
            _layer(partial / "image" / layer, partial / "root")
        config = json.loads((partial / "image" / manifest["Config"]).read_text()).get("config") or {}
        shutil.rmtree(partial / "image")
    except (tarfile.TarError, KeyError, ValueError, OSError) as error:
        raise SandboxError(f"{tarball} cannot be unpacked as a root file system: {error}") from error
    return dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)


def _layer(layer: Path, root: Path) -> None:
    """Unpack one layer over those before it; names that begin with `.wh.` delete."""
    with tarfile.open(layer) as archive:
        names = [Path(name) for name in archive.getnames()]
    for name in names:
        if name.name == _OPAQUE:
            for there in (root / name.parent).glob("*"):
                _remove(there)
        elif name.name.startswith(_WHITEOUT):
            _remove(root / name.parent / name.name.removeprefix(_WHITEOUT))
    _untar(layer, root, f"--exclude={_WHITEOUT}*")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        _delete(path)
    else:
        path.unlink(missing_ok=True)


def _untar(tarball: Path, target: Path, *more: str) -> None:
    """By tar itself: links may point anywhere within the new root; devices are the sandbox's own."""
    command = ["tar", "-xf", str(tarball), "-C", str(target), "--no-same-owner", "--exclude=dev/*", "--exclude=./dev/*"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SandboxError(f"{tarball} cannot be unpacked: {done.stderr.strip()[-300:]}")

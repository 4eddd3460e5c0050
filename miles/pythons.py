"""Which Pythons there are on this machine, and how packages get into one: by uv where it is, else venv and pip."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from miles.errors import ConfigError, EnvError

__all__ = [
    "LEFT_OUT",
    "build_venv",
    "choose_python",
    "installed",
    "lock_packages",
    "make_venv",
    "python_of",
    "version_of",
]

_LIMIT_S = 1800.0
LEFT_OUT = ("__pycache__", ".git", ".venv", ".miles", "build", "dist", "*.egg-info", ".*_cache", "runs", "evals")
"""What of a project's folder is no part of it."""


@cache
def uv() -> str | None:
    """uv, if it is on the path or installed beside us."""
    if importlib.util.find_spec("uv") is not None:
        beside = Path(sys.executable).with_name("uv")
        if beside.is_file():
            return str(beside)
    return shutil.which("uv")


@cache
def version_of(python: Path) -> str:
    """ "3.12.1"; empty for what is no Python."""
    try:
        done = subprocess.run(
            [python, "-c", "import sys; print(sys.version.split()[0])"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


@cache
def found() -> tuple[tuple[str, Path], ...]:
    """Every Python 3 of the path, of pyenv and of uv, as (version, interpreter); ours first."""
    ours = (sys.version.split()[0], Path(sys.executable))
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    shared = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    places = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    places += sorted(home.glob("3.*/bin")) + sorted(shared.glob("*/bin"))
    others: dict[str, Path] = {}
    for place in places:
        for path in sorted(place.glob("python3.*")) if place.is_dir() else ():
            if re.fullmatch(r"python3\.\d+", path.name) and re.fullmatch(r"3[\d.]+", version := version_of(path)):
                others.setdefault(version, path)
    others.pop(ours[0], None)
    return (ours, *sorted(others.items(), key=lambda item: Version(item[0])))


def choose_python(wanted: str, needs: str, what: str) -> Path:
    """An interpreter: the wanted one (a version or a path), else ours if it fits `needs`, else the newest that does.

    ConfigError says what is there and how to get what is not.
    """
    if wanted and os.sep in wanted:
        version = version_of(Path(wanted))
        if not version:
            raise ConfigError(f"{wanted} is no Python interpreter")
        candidates: Sequence[tuple[str, Path]] = [(version, Path(wanted))]
    else:
        candidates = found()
    try:
        allowed = SpecifierSet(needs) & SpecifierSet(_prefix(wanted) if wanted and os.sep not in wanted else "")
    except InvalidSpecifier as error:
        raise ConfigError(f"{wanted or needs!r} is no Python version: write 3.12, or a path") from error
    fitting = [(version, path) for version, path in candidates if version in allowed]
    if not fitting:
        there = ", ".join(version for version, _ in candidates)
        example = wanted or next((v for v in ("3.12", "3.13", "3.11") if Version(v) in allowed), "3.12")
        raise ConfigError(
            f"{what} needs Python {allowed or 'of any version'}, and here is {there}. Install one (uv python install "
            f"{example}, pyenv install {example}, or your system's package python{example}), or name it: "
            "--python /path/to/python"
        )
    return fitting[0][1] if fitting[0] == candidates[0] else fitting[-1][1]


def _prefix(version: str) -> str:
    try:
        parsed = Version(version)
    except InvalidVersion:
        return version  # a specifier, as >=3.12
    return f"=={version}" if len(parsed.release) > 2 else f"=={version}.*"


def python_of(folder: Path) -> Path:
    """The interpreter of an installed environment."""
    return folder / "venv" / "bin" / "python"


def lock_packages(python: Path, requires: Sequence[str], projects: Sequence[Path], folder: Path) -> tuple[str, ...]:
    """Versions and hashes of everything that `requires` and the projects' own requirements need, as lines."""
    if not requires and not projects:
        return ()
    folder.mkdir(parents=True, exist_ok=True)
    asked = folder / "asked.txt"
    asked.write_text("".join(f"{line}\n" for line in requires))
    if (tool := uv()) is not None:
        command = [
            tool,
            "pip",
            "compile",
            "-q",
            "--no-header",
            "--no-annotate",
            "--generate-hashes",
            "--python",
            str(python),
        ]
        command += ["--no-python-downloads", str(asked)]
        command += [str(project / "pyproject.toml") for project in projects if (project / "pyproject.toml").is_file()]
        return _joined(_run(command, "the packages cannot be resolved"))
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--dry-run",
        "--ignore-installed",
        "--report",
        "-",
        "-r",
        str(asked),
    ]
    command += [str(project) for project in projects if (project / "pyproject.toml").is_file()]
    report = json.loads(_run(command, "the packages cannot be resolved"))
    lines = []
    for item in report["install"]:
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" in hashes:
            name, version = item["metadata"]["name"], item["metadata"]["version"]
            lines.append(f"{name.lower()}=={version} --hash=sha256:{hashes['sha256']}")
    return tuple(sorted(lines))


def _joined(text: str) -> tuple[str, ...]:
    lines = text.replace("\\\n", " ").splitlines()
    return tuple(sorted(" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")))


def make_venv(python: Path, venv: Path) -> list[str]:
    """A new, empty environment; the command that installs packages into it. EnvError with the tool's words."""
    shutil.rmtree(venv, ignore_errors=True)
    inside = str(venv / "bin" / "python")
    if (tool := uv()) is not None:
        _run(
            [tool, "venv", "-q", "--no-python-downloads", "--python", str(python), str(venv)],
            "no environment can be made",
        )
        return [tool, "pip", "install", "-q", "--python", inside]
    _run([str(python), "-m", "venv", str(venv)], "no environment can be made")
    return [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check"]


def build_venv(python: Path, packages: Sequence[str], projects: Sequence[Path], folder: Path) -> None:
    """A new environment in `folder`/venv with exactly these packages; EnvError with the tool's words when it fails.

    The projects themselves are installed last, without their requirements, which are among the packages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    locked = folder / "locked.txt"
    locked.write_text("".join(f"{line}\n" for line in packages))
    install = make_venv(python, folder / "venv")
    if packages:
        _run([*install, "--require-hashes", "--no-deps", "-r", str(locked)], "the packages cannot be installed")
    for project in projects:
        if (project / "pyproject.toml").is_file():
            with tempfile.TemporaryDirectory(prefix="miles-build-") as scratch:  # building leaves things behind
                copy = Path(scratch) / project.name
                shutil.copytree(project, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
                _run([*install, "--no-deps", str(copy)], f"{project} cannot be installed")


def installed(folder: Path) -> dict[str, str]:
    """Name -> version of what an environment has."""
    code = "import json, importlib.metadata as m\n"
    code += "print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found: dict[str, str] = json.loads(_run([str(python_of(folder)), "-c", code], "its packages cannot be listed"))
    return {canonicalize_name(name): version for name, version in found.items()}


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except OSError as error:
        raise EnvError(f"{what}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-3000:]
        raise EnvError(f"{what}: {' '.join(command[:4])} … said:\n{said}{_missing(said)}")
    return done.stdout


def _missing(said: str) -> str:
    """What to install where a build failed for want of it; empty where that cannot be told."""
    if re.search(r"command '\S*(cc|gcc|clang|c\+\+|g\+\+)\S*' failed: No such file|(gcc|cc|clang): not found", said):
        return (
            "\nA package must be compiled, and there is no C compiler: apt install build-essential (or your system's)"
        )
    if re.search(r"Python\.h: No such file", said):
        return (
            "\nA package must be compiled, and Python's headers are missing: apt install python3-dev (or your system's)"
        )
    return ""

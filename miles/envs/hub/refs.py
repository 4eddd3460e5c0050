"""What a user types after `miles env add`, taken apart."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from miles.errors import ConfigError
from miles.registry import known

__all__ = ["Ref", "default_name", "kind_of_folder", "parse_ref", "setting"]

PREFIXES = {
    "gymnasium": "gymnasium",
    "gym": "gymnasium",
    "reasoning-gym": "reasoning-gym",
    "rg": "reasoning-gym",
    "textarena": "textarena",
    "openenv": "openenv",
    "verifiers": "verifiers",
    "prime": "verifiers",
    "harbor": "harbor",
    "nemo-gym": "nemo-gym",
    "hud": "hud",
    "inspect": "inspect",
    "miles": "miles",
}
FORMS = (
    "gymnasium:Taxi-v4, reasoning-gym:chain_sum?size=500, textarena:TicTacToe-v0, openenv:./folder or user/space, "
    "a URL, verifiers:./folder, verifiers:name@1.2 or verifiers:owner/name, harbor:./tasks, nemo-gym:NAME, hud:env.py, "
    "inspect:file.py@task, a folder, a git URL (git+https://…@commit), module:attr"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """`kind:target@version?key=value`. `target` may be a path as typed; `git` is a repository to clone first."""

    kind: str
    target: str
    version: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    git: str = ""

    def path(self, root: Path) -> Path | None:
        """The local file or folder that is meant, if it is one."""
        if "://" in self.target or not self.target:
            return None
        path = (root / Path(self.target).expanduser()).resolve()
        return path if path.exists() else None


def parse_ref(text: str, root: Path) -> Ref:
    """Take a reference apart. ConfigError lists the forms there are."""
    text = text.strip()
    prefix, colon, rest = text.partition(":")
    kind = PREFIXES.get(prefix) if colon and not rest.startswith("//") else None
    if kind is None:
        rest = text
    if not rest:
        raise ConfigError(f"{text!r} names no environment. Forms: {FORMS}")
    if rest.startswith(("git+", "git@")) or rest.endswith(".git"):
        return Ref(kind=kind or "", target="", git=rest.removeprefix("git+"))
    rest, settings = _settings(rest)
    target, version = _version(rest, kind)
    if kind == "openenv" and re.fullmatch(r"[\w-]+/[\w.-]+", target) and not (root / target).exists():
        return Ref(kind=kind, target="", git=f"https://huggingface.co/spaces/{target}", settings=settings)
    ref = Ref(kind=kind or "", target=target, version=version, settings=settings)
    if kind is not None:
        return ref
    path = ref.path(root)
    if path is not None and path.is_dir():
        return Ref(kind=kind_of_folder(path), target=target, settings=settings)
    if re.match(r"(https?|wss?)://", rest):
        return Ref(kind="openenv", target=rest, settings=settings)
    if rest.startswith("tcp://"):
        return Ref(kind="hud", target=rest, settings=settings)
    if re.fullmatch(r"[\w.]+:[\w.]+", text) or text in known("envs"):
        return Ref(kind="miles", target=text)
    raise ConfigError(f"{text!r} is no folder here and no known reference. Forms: {FORMS}")


def _settings(rest: str) -> tuple[str, dict[str, Any]]:
    if "://" in rest:
        return rest, {}
    rest, _, query = rest.partition("?")
    return rest, {key: _value(raw) for key, raw in parse_qsl(query, keep_blank_values=True)}


def _value(raw: str) -> Any:
    """As TOML reads it, else text."""
    try:
        return tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return raw


def setting(word: str) -> tuple[str, Any]:
    """One "key=value" as typed. ConfigError when it is none."""
    key, equals, raw = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{word!r} must look like key=value")
    return key, _value(raw)


def _version(rest: str, kind: str | None) -> tuple[str, str]:
    if "://" in rest or kind in ("inspect", None):  # inspect's file.py@task
        return rest, ""
    target, _, version = rest.partition("@")
    return target, version


def kind_of_folder(path: Path) -> str:
    """Which ecosystem a folder belongs to, by the files it has. ConfigError when nothing tells."""
    project = path / "pyproject.toml"
    text = project.read_text() if project.is_file() else ""
    marks: list[tuple[Callable[[], bool], str]] = [
        (lambda: (path / "openenv.yaml").is_file(), "openenv"),
        (lambda: (path / "task.toml").is_file() or any(path.glob("*/task.toml")), "harbor"),
        (lambda: "miles.envs" in text, "miles"),
        (
            lambda: "verifiers" in text or any("load_environment" in _text(file) for file in path.glob("*.py")),
            "verifiers",
        ),
        (lambda: any(re.search(r"\bfrom hud\b|\bimport hud\b", _text(file)) for file in path.glob("*.py")), "hud"),
    ]
    for there, kind in marks:
        if there():
            return kind
    raise ConfigError(
        f"{path} is no environment that Miles knows: no openenv.yaml, task.toml, verifiers package, nor a "
        "pyproject.toml with an entry point of the group miles.envs. Say its kind, as verifiers:./folder"
    )


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def default_name(ref: Ref) -> str:
    """A short name made of the reference: Taxi-v4 gives taxi, ./guess_env gives guess-env."""
    last = (
        (ref.git or ref.target)
        .rstrip("/")
        .rpartition("/")[2]
        .removesuffix(".git")
        .partition("@")[2 if ref.kind == "inspect" else 0]
    )
    last = last or Path(ref.target).name
    if "://" not in ref.target:  # module:Env-v0 is called Env
        last = last.rpartition(":")[2]
    last = re.sub(r"-v\d+$", "", last).removesuffix(".py")
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-") or ref.kind

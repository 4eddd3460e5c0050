"""miles.toml and miles.lock: what a project declares (its comments are kept), and what that became."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import tomli_w
import tomlkit
from pydantic import Field
from tomlkit.items import InlineTable

from miles.config import Config, build, read_toml
from miles.envs.rewards import JudgeConfig
from miles.envs.selection import SelectionConfig
from miles.errors import ConfigError
from miles.pythons import LEFT_OUT

__all__ = ["EnvEntry", "LockEntry", "Project"]

_HEAD = "# Written by `miles env add`, `lock` and `sync`. Commit it; do not edit it.\n\n"


"""What of a folder is neither digested nor installed."""


class EnvEntry(Config):
    """One environment in miles.toml: [envs.NAME]."""

    ref: str
    """What it is, as typed after `miles env add`."""
    python: str = ""
    """Its Python: a version ("3.12") or a path; empty: any that fits."""
    requires: tuple[str, ...] = ()
    """Packages beside its own."""
    layer: str = ""
    """"env" or "agent", where an environment can be played both ways; empty: its usual one."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment itself."""
    tasks: SelectionConfig = SelectionConfig()
    """Which of its tasks."""
    rewards: dict[str, JudgeConfig] = Field(default_factory=dict)
    """Parts of the reward; empty: the environment's own."""
    concurrency: int | None = Field(None, gt=0)
    """Episodes at a time; None: what the environment can."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that its worker gets."""
    secrets: tuple[str, ...] = ()
    """Names of variables of yours that its worker may see."""
    start_s: float = Field(120.0, gt=0)
    """Seconds until it must be ready."""


class LockEntry(Config):
    """What an environment became: enough to build it again elsewhere."""

    ref: str
    """As declared."""
    kind: str
    """Its ecosystem."""
    python: str = ""
    """The Python it was built with; empty: ours."""
    packages: tuple[str, ...] = ()
    """"name==version --hash=sha256:… …", sorted."""
    requires: tuple[str, ...] = ()
    """What was asked for."""
    source: str = ""
    """"sha256:…" of a local folder, or the commit of a repository."""
    declared: str = ""
    """"sha256:…" of what decides how it is built and which tasks it has: settings, layer, Python."""
    splits: dict[str, int] = Field(default_factory=dict)
    """Tasks by split (-1: endless)."""
    tasks: str = ""
    """"sha256:…" of the tasks."""


@dataclass
class Project:
    """The folder that holds miles.toml."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> "Project":
        """The nearest folder upwards with a miles.toml; the present one when there is none."""
        start = (start or Path.cwd()).resolve()
        for folder in (start, *start.parents):
            if (folder / "miles.toml").is_file():
                return cls(folder)
        return cls(start)

    @property
    def file(self) -> Path:
        return self.root / "miles.toml"

    @property
    def lock_file(self) -> Path:
        return self.root / "miles.lock"

    def folder(self, name: str) -> Path:
        """Where an environment is installed; never committed. ConfigError for a name that could lead elsewhere."""
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
            raise ConfigError(f"{name!r} cannot be an environment's name: use letters, digits, hyphens and dots")
        home = self.root / ".miles"
        home.mkdir(exist_ok=True)
        (home / ".gitignore").write_text("*\n")
        return home / "envs" / name

    def entries(self) -> dict[str, EnvEntry]:
        """Everything that is declared. ConfigError names the key that is wrong."""
        if not self.file.is_file():
            return {}
        found = read_toml(self.file).get("envs", {})
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self.file}: envs must be a table of environments")
        for name in found:
            self.folder(name)
        return {name: self._entry(name, told) for name, told in found.items()}

    def _entry(self, name: str, told: Any) -> EnvEntry:
        try:
            return build(EnvEntry, told if isinstance(told, Mapping) else {"ref": told})
        except ConfigError as error:
            raise ConfigError(f"{self.file}, envs.{name}: {error.message}") from error

    def entry(self, name: str) -> EnvEntry:
        """One environment; ConfigError lists the declared ones."""
        entries = self.entries()
        if name not in entries:
            raise ConfigError(
                f"{self.file} declares no environment {name!r}; only {', '.join(entries) or 'none'}: miles env add"
            )
        return entries[name]

    def declare(self, name: str, told: Mapping[str, Any]) -> None:
        """Write [envs.NAME], leaving everything else of the file as it is."""
        with self._edited() as document:
            envs = document.setdefault("envs", tomlkit.table(is_super_table=True))
            if isinstance(envs, InlineTable):
                raise ConfigError(f"{self.file}: write envs as tables, [envs.NAME], not on one line")
            table = tomlkit.table()
            table.update(dict(told))
            envs[name] = table

    def forget(self, name: str) -> None:
        """Take an environment out of both files."""
        with self._edited() as document:
            del document["envs"][name]
            if not document["envs"]:
                del document["envs"]
        self.write_lock({other: entry for other, entry in self.locks().items() if other != name})

    @contextmanager
    def _edited(self) -> Iterator[Any]:
        document = tomlkit.parse(self.file.read_text()) if self.file.is_file() else tomlkit.document()
        yield document
        self.file.write_text(tomlkit.dumps(document))

    def locks(self) -> dict[str, LockEntry]:
        """What miles.lock says."""
        if not self.lock_file.is_file():
            return {}
        try:
            return {name: build(LockEntry, told) for name, told in read_toml(self.lock_file).get("envs", {}).items()}
        except ConfigError as error:
            raise ConfigError(
                f"{self.lock_file} cannot be read ({error.message}): write it anew with miles env lock"
            ) from error

    def write_lock(self, entries: Mapping[str, LockEntry]) -> None:
        """All entries, sorted by name."""
        told = {name: entries[name].model_dump(mode="json", exclude_defaults=True) for name in sorted(entries)}
        self.lock_file.write_text(_HEAD + tomli_w.dumps({"version": 1, "envs": told}, multiline_strings=True))


def digest_of(value: Any) -> str:
    """sha256 of a JSON-able value."""
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def digest_of_folder(path: Path) -> str:
    """sha256 of names and contents; caches and version control left out."""
    found = hashlib.sha256()
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in files:
        parts = file.relative_to(path).parts if file != path else ()
        if file.is_file() and not any(fnmatch(part, left) for part in parts for left in LEFT_OUT):
            found.update(f"\0{'/'.join(parts)}\0".encode())
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return "sha256:" + found.hexdigest()

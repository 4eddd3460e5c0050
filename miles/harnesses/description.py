"""What a program is, as a file says it: `harness.toml`. Texts in it may name values as `$prompt` or `${prompt_json}`.

The values are those of `VALUES` and the program's own settings; `NAME_json` is the value as JSON, for files that
quote it. A table `[when.NAME]` adds to the run where the value is there (not empty, not false), `[unless.NAME]` where
it is not.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, Literal

from pydantic import Field, create_model

from miles.config import Config, build, read_toml
from miles.errors import ConfigError
from miles.registry import resolve

__all__ = ["Description", "Launch", "describe", "settings_class"]


VALUES: tuple[str, ...] = ("prompt", "system", "model", "base_url", "root_url", "api_key", "context", "max_tokens")
VALUES += ("mcp_url", "home", "seconds", "root", "node", "python")
"""What texts may name besides the program's own settings."""


class Installation(Config):
    """How the program comes onto this host: once, at exactly these versions."""

    npm: tuple[str, ...] = ()
    """Packages of npm, as name@version."""
    node: str = "22.20.0"
    """The Node.js that they are installed with and run on."""
    pip: tuple[str, ...] = ()
    """Packages of PyPI, as name==version; also wheels and folders, relative to this file."""
    folder: str = ""
    """A folder beside this file that is the program itself, or belongs to it; it becomes `$root`."""
    python: str = ">=3.11"
    """Pythons that the packages work on."""
    check: tuple[str, ...] = ()
    """A command whose output must have the version in it; for packages there must be one."""
    executables: tuple[str, ...] = ()
    """Files of it that must be executable, and are not as they come."""
    needs: tuple[str, ...] = ()
    """Programs that a sandbox must have besides."""


class MachineNeeds(Config):
    """The least that a sandbox must offer."""

    memory_mib: int = Field(2048, gt=0)
    """Memory."""
    pids: int = Field(512, gt=0)
    """Processes and threads."""
    disk_mib: int = Field(512, gt=0)
    """Room for files."""
    cpus: float = Field(2.0, gt=0)
    """Processors."""


class Part(Config):
    """Words, variables and files of a run."""

    arguments: tuple[str, ...] = ()
    """Words behind the command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables."""
    files: dict[str, str] = Field(default_factory=dict)
    """Contents by path."""


class Run(Part):
    """How the program is started."""

    command: tuple[str, ...]
    """The program and its first words."""
    first: tuple[tuple[str, ...], ...] = ()
    """Commands before it, as a log-in."""
    stdin: str = ""
    """Its standard input."""


class SessionNeeds(Config):
    """What the session server does for it."""

    canonicalisers: tuple[str, ...] = ()
    """Changes to its requests before tokenising, so that equal prompts are equal tokens."""
    report_truncation: bool = True
    """Whether it is told that an answer was cut at its token limit."""
    wishes: Literal["refuse", "record"] = "record"
    """What becomes of a forced tool choice or output format."""


class Setting(Config):
    """One setting of the program: `harness.settings.NAME`."""

    default: bool | int | str
    """Its value where a recipe gives none."""
    help: str
    """One line."""


class Trial(Config):
    """How a scripted model speaks to it, for `miles harness test`."""

    tool: str = ""
    """The tool that runs a command."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, with `$command`."""
    text: str = ""
    """For programs without tools: what the model writes to have `$command` run (`${line_json}`: with its Enter)."""
    script: tuple[str, ...] = ()
    """For programs that run no commands: what the model says to solve the task `python-sum-range`."""
    finish: str | dict[str, Any] = "The task is done."
    """The last answer: a text, or {tool, arguments}."""
    env_tool: str = "mcp__env__$tool"
    """The name under which the model sees a tool of the environment."""
    env_arguments: dict[str, Any] = Field(default_factory=dict)
    """What it wants in the arguments of every tool besides."""


class Description(Config):
    """A whole `harness.toml`."""

    title: str
    """The program's name."""
    home: str = ""
    """Where it is from."""
    version: str = Field(min_length=1)
    """The version that is installed."""
    dialect: Literal["chat", "responses", "messages"]
    """What it speaks to the model."""
    calls_tools: bool = True
    """Whether its work goes on as long as the model calls tools; else an end in the middle of it is told by failing."""
    plugin: str = ""
    """module:attr of a subclass of `ProgramHarness`, where words are not enough."""
    install: Installation
    """How it comes here."""
    machine: MachineNeeds = MachineNeeds()
    """What it runs on."""
    run: Run
    """How it is started."""
    when: dict[str, Part] = Field(default_factory=dict)
    """What is added where a value is there."""
    unless: dict[str, Part] = Field(default_factory=dict)
    """What is added where it is not."""
    session: SessionNeeds = SessionNeeds()
    """What the session server does for it."""
    settings: dict[str, Setting] = Field(default_factory=dict)
    """Its settings."""
    trial: Trial = Trial()
    """How a scripted model speaks to it."""
    notes: dict[str, str] = Field(default_factory=dict)
    """What a user should know: limits, end, side calls, sub-agents, compaction, leftovers, prefix."""

    @property
    def takes_mcp(self) -> bool:
        """Whether it can be given tools over MCP."""
        return "mcp_url" in self.when

    def launch(self, values: Mapping[str, Any]) -> "Launch":
        """The run with all values filled in. ConfigError for a name that is no value."""
        parts: list[Part] = [self.run]
        parts += [part for name, part in self.when.items() if values.get(name)]
        parts += [part for name, part in self.unless.items() if not values.get(name)]
        texts = _texts(values)

        def fill(text: str) -> str:
            try:
                return Template(text).substitute(texts)
            except (KeyError, ValueError) as error:
                known = ", ".join(sorted(name for name in texts if not name.endswith("_json")))
                raise ConfigError(f"{self.title}: {text[:80]!r} names {error}; a value is one of {known}") from error

        arguments = [word for part in parts for word in part.arguments]
        return Launch(
            command=tuple(fill(word) for word in (*self.run.command, *arguments)),
            first=tuple(tuple(fill(word) for word in command) for command in self.run.first),
            stdin=fill(self.run.stdin),
            env={name: fill(text) for part in parts for name, text in part.env.items()},
            files={fill(path): fill(text) for part in parts for path, text in part.files.items()},
        )


class Launch(Config):
    """A run with every value in its place."""

    command: tuple[str, ...]
    """What is executed."""
    first: tuple[tuple[str, ...], ...] = ()
    """Commands before it."""
    stdin: str = ""
    """Its standard input."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables."""
    files: dict[str, str] = Field(default_factory=dict)
    """Contents by path."""


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    words = {True: "true", False: "false"}
    plain = {name: words[value] if isinstance(value, bool) else str(value) for name, value in values.items()}
    return plain | {f"{name}_json": _quoted(value) for name, value in values.items()}


def _quoted(value: Any) -> str:
    """As JSON that is also a string of TOML: no halves of surrogate pairs, no bare control characters."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def describe(path: Path) -> Description:
    """Read a `harness.toml`; ConfigError names the file and every key that is wrong."""
    told = read_toml(path)
    try:
        description = build(Description, told)
        _check(description)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    return description


def _check(description: Description) -> None:
    """What would otherwise be found in every episode."""
    if (description.install.npm or description.install.pip) and not description.install.check:
        raise ConfigError('install.check: say which command tells the version, as ["$python", "-m", "x", "--version"]')
    settings = {name: setting.default for name, setting in description.settings.items()}
    if taken := sorted(settings.keys() & (set(VALUES) | set(dir(Config)))):
        raise ConfigError(f"settings.{taken[0]}: this name is taken; choose another")
    known = {**dict.fromkeys(VALUES, "x"), **settings}
    for table in ("when", "unless"):
        if unknown := sorted(set(getattr(description, table)) - set(known)):
            raise ConfigError(f"{table}.{unknown[0]} is no value; there are: {', '.join(sorted(known))}")
    for given in ({}, dict.fromkeys(settings, ""), dict.fromkeys(VALUES, "")):
        description.launch({**known, **given})
    places = {name: known[name] for name in ("root", "node", "python")}
    for word in description.install.check:
        try:
            Template(word).substitute(places)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"install.check: {word!r} names {error}; a value is root, node or python") from error
    for name in description.session.canonicalisers:
        resolve("canonicalisers", name)


def settings_class(name: str, description: Description) -> type[Config]:
    """A config of the settings that the description declares."""
    fields: dict[str, Any] = {
        key: (type(setting.default), Field(setting.default, description=setting.help))
        for key, setting in description.settings.items()
    }
    made: type[Config] = create_model(f"{name}Settings", __base__=Config, **fields)
    return made

"""`miles harness list | info | install | export | test`: the programs around a model."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from miles.errors import ConfigError
from miles.registry import known, resolve

__all__ = ["add_commands", "export", "info", "install", "listed", "test"]


def add_commands(commands: Any) -> None:
    """The subcommands of `miles harness`."""
    harness = commands.add_parser("harness", help="list, install and try agent programs")
    what = harness.add_subparsers(dest="what", required=True)
    every = what.add_parser("list", help="every harness, and whether it is installed here")
    told = what.add_parser("info", help="one harness: version, settings, limits, what it does beside its work")
    made = what.add_parser("install", help="have its program on this host, for all sandboxes to see")
    copied = what.add_parser("export", help="copy its program into a folder that becomes part of an image")
    tested = what.add_parser("test", help="let it play real tasks with a scripted model")
    for command in (told, made, copied, tested):
        command.add_argument("harness", help="a name, or the path of a harness.toml")
    copied.add_argument("folder", type=Path, help="the image's root: COPY FOLDER/ / in its Dockerfile")
    tested.add_argument("--backend", default="local", help="the sandbox it plays in (default: %(default)s)")
    tested.add_argument("--image", default="", help="the sandbox's image")
    tested.add_argument(
        "--only", action="append", default=[], metavar="CHECK", help="the first check and this one; may be repeated"
    )
    tested.add_argument("--keep", type=Path, metavar="FILE", help="write what was said in every episode, for a look")
    tested.add_argument("settings", nargs="*", metavar="key=value", help="settings of the harness, as max_turns=8")
    calls = {"listed": every, "info": told, "install": made, "export": copied, "test": tested}
    for call, command in calls.items():
        if call in ("listed", "info", "test"):
            command.add_argument("--json", action="store_true", help="machine-readable")
        command.set_defaults(call=f"miles.cli.harness:{call}")


def _program(name: str) -> Any:
    """The class of a program; ConfigError for a harness that is none."""
    from miles.harnesses.program import ProgramHarness, program_class

    found = program_class(Path(name)) if name.endswith(".toml") else resolve("harnesses", name)
    if not (isinstance(found, type) and issubclass(found, ProgramHarness)):
        raise ConfigError(
            f"harness {name!r} is no program: it is part of Miles or of an environment, with nothing to install"
        )
    return found


def listed(options: argparse.Namespace) -> int:
    """One line for each harness."""
    from miles.harnesses.install import installed
    from miles.harnesses.program import ProgramHarness

    found: dict[str, dict[str, Any]] = {}
    for name in sorted(known("harnesses")):
        try:
            made = resolve("harnesses", name)
        except ConfigError as error:
            found[name] = {"problem": str(error)}
            continue
        if isinstance(made, type) and issubclass(made, ProgramHarness):
            told = made.description
            here = installed(made.name, told, made.folder) is not None
            facts = {"title": told.title, "version": told.version, "dialect": told.dialect, "mcp": told.takes_mcp}
            found[name] = {**facts, "installed": here}
        else:
            found[name] = {"title": (made.__doc__ or "").strip().partition("\n")[0]}
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, facts in found.items():
        if "version" in facts:
            state = "installed" if facts["installed"] else "-"
            mcp = "mcp" if facts["mcp"] else "command"
            print(f"{name:16} {facts['title']:16} {facts['version']:10} {facts['dialect']:10} {mcp:8} {state}")
        else:
            print(f"{name:16} {facts.get('title') or facts['problem']}")
    return 0


def info(options: argparse.Namespace) -> int:
    """What its description says; of what is no program, its settings."""
    from miles.harnesses.program import ProgramHarness

    if not options.harness.endswith(".toml"):
        found = resolve("harnesses", options.harness)
        if isinstance(found, type) and not issubclass(found, ProgramHarness):
            return _of_ours(options.harness, found)
    program = _program(options.harness)
    told = program.description
    if options.json:
        print(json.dumps(told.model_dump(mode="json"), indent=1))
        return 0
    packages = ", ".join((*told.install.npm, *told.install.pip))
    print(f"{told.title} {told.version} ({packages}), speaks {told.dialect}")
    machine = told.machine
    print(f"sandbox: {machine.memory_mib} MiB of memory, {machine.disk_mib} MiB of disk, {machine.pids} processes")
    seen = f"over MCP, as {told.trial.env_tool.replace('$tool', 'NAME')}"
    print("environment's tools: " + (seen if told.takes_mcp else "as a command, /tmp/env-tool NAME ARGUMENTS"))
    if told.session.canonicalisers:
        print(f"its requests are changed by: {', '.join(told.session.canonicalisers)}")
    for name, setting in told.settings.items():
        print(f"harness.settings.{name} = {json.dumps(setting.default)}   {setting.help}")
    for name, text in told.notes.items():
        print(f"{name}: {text}")
    return 0


def _of_ours(name: str, harness: type) -> int:
    print((harness.__doc__ or name).strip().partition("\n")[0])
    config = getattr(harness, "config_class", None)
    for key, field in (config.model_fields if config is not None else {}).items():
        print(f"harness.settings.{key} = {json.dumps(field.default)}   {field.description}")
    return 0


def install(options: argparse.Namespace) -> int:
    """Download once, at its exact version."""
    from miles.harnesses.install import install as have

    program = _program(options.harness)
    made = have(program.name, program.description, program.folder, tell=lambda text: print(text, file=sys.stderr))
    print(f"{program.description.title} {program.description.version} is in {made.folder}")
    return 0


def export(options: argparse.Namespace) -> int:
    """For providers that cannot show folders of this host."""
    from miles.harnesses import install as place

    program = _program(options.harness)
    made = place.install(program.name, program.description, program.folder)
    try:
        place.export(made, options.folder)
    except OSError as error:
        raise ConfigError(f"{options.folder} cannot be written: {error}") from error
    print(f"{program.description.title} is below {options.folder}: `COPY {options.folder.name}/ /` in the Dockerfile")
    return 0


def test(options: argparse.Namespace) -> int:
    """Checks, then how much of its prompts it keeps; the status tells whether all checks hold."""
    from miles.recipes.harnesscheck import CHECKS, check_harness
    from miles.sandboxes.pool import SandboxConfig

    if wrong := [name for name in options.only if name not in CHECKS]:
        raise ConfigError(f"there is no check {wrong[0]!r}; there are: {', '.join(CHECKS)}")

    if options.keep is not None and not options.keep.absolute().parent.is_dir():
        raise ConfigError(f"--keep {options.keep}: there is no folder {options.keep.absolute().parent}")
    if options.harness == "own":
        raise ConfigError("own is an environment's agent: `miles env test NAME` tries it")

    def tell(title: str, status: str, detail: str) -> None:
        if not options.json:
            print(f"{status:9} {title:42} {detail}".rstrip(), flush=True)

    report, found = asyncio.run(
        check_harness(
            options.harness,
            _settings(options.harness, options.settings),
            sandbox=SandboxConfig(backend=options.backend, image=options.image),
            only=options.only,
            tell=tell,
            keep=options.keep,
        )
    )
    failed = sum(entry["status"] == "FAILED" for entry in report)
    if options.json:
        facts = {"turns": found.turns, "extended": found.extended, "reused": found.reused, "causes": found.causes}
        print(json.dumps({"checks": report, "stability": facts}, indent=1))
        return 1 if failed else 0
    kept = f"{found.reused:.1%} of tokens reused"
    print(f"prompts: {found.extended} of {found.turns} turns extend the one before, {kept}")
    for cause, count in found.causes.items():
        print(f"         {count} x {cause}")
    return 1 if failed else 0


def _settings(name: str, words: list[str]) -> dict[str, Any]:
    from miles.config import apply_overrides

    return apply_overrides(_program(name).config_class, {}, words) if words else {}

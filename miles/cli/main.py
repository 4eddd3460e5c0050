"""`miles …`: parse, look up, call. Nothing else happens here."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from miles import __version__
from miles.cli import engine, env, evaluate, harness, sandbox, session
from miles.errors import ConfigError, MilesError

__all__ = ["main", "parser"]

_SETTINGS = {"launch": "overrides"} | dict.fromkeys(("engine", "sandbox", "env", "eval", "harness"), "settings")
"""Commands that take settings anywhere, and where they go."""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="miles",
        description="Any environment, any agent harness, any sandbox; one asynchronous RL trainer.",
    )
    top.add_argument("--version", action="version", version=f"miles {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    launch = commands.add_parser("launch", help="train: miles launch RECIPE [section.key=value …]")
    launch.add_argument("recipe", nargs="?", help="name of a recipe, or a .toml file")
    launch.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the recipe's")
    launch.add_argument("--resume", metavar="RUN", type=Path, help="go on with a run; settings may follow")
    launch.add_argument("--smoke", action="store_true", help="the recipe's small version, for this machine")
    launch.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    launch.add_argument("--plain", action="store_true", help="plain lines even on a terminal")
    launch.set_defaults(call="miles.cli.launch:launch")

    recipe = commands.add_parser("recipe", help="list and show recipes").add_subparsers(dest="what", required=True)
    recipe.add_parser("list", help="recipes that come with Miles").set_defaults(call="miles.cli.show:recipe_list")
    show = recipe.add_parser("show", help="a recipe with all its defaults")
    show.add_argument("recipe")
    show.set_defaults(call="miles.cli.show:recipe_show")

    runs = commands.add_parser("runs", help="list, show and save runs").add_subparsers(dest="what", required=True)
    listed = runs.add_parser("list", help="runs of a folder")
    shown = runs.add_parser("show", help="one run: config, steps, evaluation, outcomes")
    shown.add_argument("run", help="a run folder, or its name")
    saved = runs.add_parser("save", help="have a run that is going on write a checkpoint now")
    saved.add_argument("run", help="a run folder, or its name")
    saved.add_argument("--root", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    saved.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", help="how long (default: 600)")
    saved.set_defaults(call="miles.cli.show:runs_save")
    for command, call in ((listed, "runs_list"), (shown, "runs_show")):
        command.add_argument("--root", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
        command.add_argument("--json", action="store_true", help="machine-readable")
        command.set_defaults(call=f"miles.cli.show:{call}")

    session.add_commands(commands)
    engine.add_commands(commands)
    env.add_commands(commands)
    evaluate.add_commands(commands)
    sandbox.add_commands(commands)
    harness.add_commands(commands)
    doctor = commands.add_parser("doctor", help="what works on this machine, and what to install")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.set_defaults(call="miles.cli.doctor:doctor")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: it failed; 2: the user can mend the command; 130: cancelled."""
    options, left = parser().parse_known_args(argv)
    settings = [word for word in left if "=" in word and not word.startswith("-")]
    if len(settings) != len(left) or (left and not hasattr(options, _SETTINGS.get(options.command, ""))):
        parser().error(f"unrecognized arguments: {' '.join(word for word in left if word not in settings)}")
    if left:  # argparse gives up on positionals after an option; settings may stand anywhere
        name = _SETTINGS[options.command]
        setattr(options, name, [*getattr(options, name), *settings])
    sys.path.insert(0, str(Path.cwd()))  # so that module:attr finds the user's own files
    module, _, name = options.call.partition(":")
    import importlib

    call = getattr(importlib.import_module(module), name)
    try:
        return int(call(options))
    except MilesError as error:
        print(f"miles: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"miles: {note}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a listing has gone
        sys.stdout = None  # nothing more to flush
        return 0


if __name__ == "__main__":
    sys.exit(main())

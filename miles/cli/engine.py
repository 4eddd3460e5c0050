"""`miles engine install | start | status | stop`: inference servers apart from any run."""

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from miles.errors import ConfigError, EngineError

__all__ = ["add_commands", "install", "start", "status", "stop"]


def add_commands(commands: Any) -> None:
    """The subcommands of `miles engine`."""
    engine = commands.add_parser("engine", help="install, start and stop inference servers")
    what = engine.add_subparsers(dest="what", required=True)
    made = what.add_parser("install", help="make an environment of its own for an engine")
    made.add_argument("engine", choices=["sglang"])
    made.add_argument("--cpu", action="store_true", help="for a machine without a GPU: tests and trials")
    made.add_argument("--release", help="another release than the one that was tested")
    made.add_argument(
        "--torch", default="torch==2.13.0", help="with --cpu: the torch to install (default: %(default)s)"
    )
    started = what.add_parser("start", help="launch servers of a model behind one address; they stay until stopped")
    started.add_argument("model", type=Path, help="a model directory")
    started.add_argument("settings", nargs="*", metavar="key=value", help="settings of [engine.sglang], as servers=2")
    started.add_argument("--name", default="default", help="what to call them (default: default)")
    started.add_argument("--host", default="127.0.0.1")
    started.add_argument("--port", type=int, default=0, help="of the common address (default: a free one)")
    started.add_argument("--foreground", action="store_true", help="stay until Ctrl-C instead of going on alone")
    shown = what.add_parser("status", help="what runs, how full it is")
    shown.add_argument("--json", action="store_true", help="machine-readable")
    stopped = what.add_parser("stop", help="end servers by name")
    stopped.add_argument("name", nargs="?", default="default")
    for command, call in ((made, "install"), (started, "start"), (shown, "status"), (stopped, "stop")):
        command.set_defaults(call=f"miles.cli.engine:{call}")


def install(options: argparse.Namespace) -> int:
    """Make the environment; minutes the first time."""
    from miles.rollout.engines.sglang.install import RELEASE
    from miles.rollout.engines.sglang.install import install as make

    make(cpu=options.cpu, release=options.release or RELEASE, torch=options.torch)
    return 0


def start(options: argparse.Namespace) -> int:
    """Launch servers and return when they answer, or stay with them."""
    from miles.config import apply_overrides, build
    from miles.places import miles_home
    from miles.rollout.engines.sglang.config import SGLangConfig
    from miles.rollout.engines.sglang.keeper import alive, keep, refuse_taken, state_file

    config = build(SGLangConfig, apply_overrides(SGLangConfig, {}, options.settings))
    if not (options.model / "config.json").is_file():
        raise ConfigError(f"{options.model} is not a model directory (no config.json)")
    logs = miles_home() / "servers" / f"{options.name}-logs"
    if options.foreground:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        settings = {"host": options.host, "port": options.port, "log_dir": logs}
        asyncio.run(keep(options.name, options.model.resolve(), config, **settings))
        return 0
    refuse_taken(options.name)
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / "keeper.log"
    with log.open("wb") as sink:
        command = [sys.executable, "-m", "miles.cli.main", *_words(options), "--foreground"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    deadline = time.monotonic() + config.start_s
    while process.poll() is None and time.monotonic() < deadline:
        state = _state(state_file(options.name))
        if state.get("url") and alive(state):
            print(f"servers of {state['model']} at {state['url']}; logs: {logs}")
            print(f"end them: miles engine stop {options.name}")
            process.returncode = 0  # it goes on without us
            return 0
        time.sleep(0.2)
    process.terminate()
    text = log.read_text(errors="replace").strip().splitlines()
    raise EngineError("the servers did not come up:\n" + "\n".join(text[-15:]))


def _words(options: argparse.Namespace) -> list[str]:
    """The command line that these options came from."""
    where = ["--name", options.name, "--host", options.host, "--port", str(options.port)]
    return ["engine", "start", str(options.model), *options.settings, *where]


def _state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return state


def status(options: argparse.Namespace) -> int:
    """Every keeper that lives, its servers, and the load of their caches."""
    from miles.rollout.engines.sglang.keeper import alive, states

    found = [{**state, "alive": alive(state)} for state in states()]
    for state in found:
        if state["alive"] and state["url"]:
            state |= asyncio.run(_asked(state["url"]))
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    if not found:
        print("no servers run; start some: miles engine start MODEL")
    for state in found:
        doing = state["url"] or "starting" if state["alive"] else "dead; `miles engine stop` forgets it"
        print(f"{state['name']:12} {doing}  {state['model']}")
        for worker in state.get("workers", ()):
            print(f"  {worker['name']:14} {worker['state']:8} {worker['url']}  deaths {worker['deaths']}", end="")
            for seat in worker["seats"]:
                full = (seat["used"] + seat["held"]) / seat["tokens"]
                print(f"  {seat['requests']} requests, {full:.0%} of {seat['tokens']} tokens", end="")
            print()
    return 0


async def _asked(url: str) -> dict[str, Any]:
    from miles.http import Http, Unreachable

    http = Http(url)
    try:
        workers: dict[str, Any] = (await http.get("/workers", limit_s=10.0)).json()
    except (Unreachable, ValueError) as error:
        return {"problem": str(error)}
    finally:
        await http.close()
    return workers


def stop(options: argparse.Namespace) -> int:
    """End servers by name."""
    from miles.rollout.engines.sglang.keeper import stop as end

    lived = end(options.name)
    print(f"{options.name} is stopped" if lived else f"{options.name} had ended already")
    return 0

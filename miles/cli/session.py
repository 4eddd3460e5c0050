"""`miles session serve | verify | export`: the recorder alone, in front of any SGLang server."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

from miles.errors import ConfigError

__all__ = ["export", "serve", "verify"]


def serve(options: argparse.Namespace) -> int:
    """Sessions over HTTP until Ctrl-C; closed ones are appended to a JSONL file."""
    from miles.rollout.session.standalone import StandaloneConfig, standalone

    config = StandaloneConfig(
        engine=options.engine,
        model=options.model,
        host=options.host,
        port=options.port,
        output=options.output,
        admin_key=options.admin_key,
        family=options.family,
        thinking=options.thinking,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
    )

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with standalone(config) as service:
            print(f"sessions at {service.url} · POST /sessions with the admin key opens one", flush=True)
            print(f"admin key {service.admin_key}", flush=True)
            await stop.wait()

    asyncio.run(run())
    return 0


def verify(options: argparse.Namespace) -> int:
    """Whether a model directory survives every scenario; 1 when it does not."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from miles.rollout.rendering.families import load_rendering
    from miles.rollout.rendering.rendering import RenderingConfig
    from miles.rollout.session.verify import verify as verify_rendering

    config = RenderingConfig(family=options.family, thinking=options.thinking)
    rendering = load_rendering(options.model, config)
    checks = verify_rendering(rendering)
    failed = sum(not check.ok for check in checks)
    if options.json:
        rows = [{name: getattr(check, name) for name in check.__slots__} for check in checks]
        print(json.dumps({"family": rendering.family, "ok": not failed, "checks": rows}, indent=1))
        return 1 if failed else 0
    table = Table(title=f"{options.model}: family {rendering.family}", title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("scenario", no_wrap=True)
    for name in ("result", "extended", "as template", "branched"):
        table.add_column(name, no_wrap=True)
    for check in checks:
        result = "refused" if check.refused else "exact" if check.ok else "FAILED"
        counts = (str(count) for count in (check.extended, check.as_template, check.branched))
        table.add_row(check.name, result, *counts)
    Console(file=sys.stdout).print(table)
    for check in checks:
        if check.detail:
            print(f"{check.name}: {check.detail}")
    print("extended: turns that go on from the ids of the turn before; as template: of these, with the tokens that a")
    print("full render would have put there; branched: rendered anew, exactly, as a branch")
    return 1 if failed else 0


def export(options: argparse.Namespace) -> int:
    """Trees of a run, one JSON line each, in the documented format."""
    from miles.runs import RunFolder
    from miles.trajectories import Trajectory

    folder = RunFolder.open(options.run if options.run.exists() else options.root / options.run)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(options.output.open("w")) if options.output else sys.stdout
        count = 0
        for episode in folder.episodes(options.pattern):
            out.write(Trajectory.of_episode(episode).to_line() + "\n")
            count += 1
    if not count:
        raise ConfigError(f"{folder.path} has no episodes that match {options.pattern!r}")
    print(f"{count} trajectories", file=sys.stderr)
    return 0


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The parsers of these commands."""
    session = commands.add_parser("session", help="the session server alone").add_subparsers(dest="what", required=True)
    model = {"type": Path, "required": True, "help": "model directory with the tokenizer that the engine serves"}
    served = session.add_parser("serve", help="record agents in front of an SGLang server")
    served.add_argument("--engine", required=True, metavar="URL", help="base URL of the SGLang server")
    served.add_argument("--model", **model)  # type: ignore[arg-type]
    served.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    served.add_argument("--port", type=int, default=8800, help="port to listen on (default: 8800; 0: a free one)")
    served.add_argument("--output", type=Path, default=Path("trajectories.jsonl"), help="where closed sessions go")
    served.add_argument("--admin-key", default="", help="opens and closes sessions; made up when left out")
    served.add_argument("--temperature", type=float, default=1.0, help="of every session, whatever clients ask for")
    served.add_argument("--max-tokens", type=int, default=4096, help="most new tokens of one model call")
    checked = session.add_parser("verify", help="does a model's rendering keep every token?")
    checked.add_argument("--model", **model)  # type: ignore[arg-type]
    checked.add_argument("--json", action="store_true", help="machine-readable")
    for command in (served, checked):
        command.add_argument("--family", default="auto", help="a renderers family, or template")
        command.add_argument("--thinking", action="store_true", help="the model thinks before it answers")
    exported = session.add_parser("export", help="a run's trees as JSONL (docs/trajectory-format.md)")
    exported.add_argument("run", type=Path, help="a run folder, or its name")
    exported.add_argument("--root", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    exported.add_argument("--pattern", default="*", help="which files of episodes/ (train-*, eval-*)")
    exported.add_argument("--output", type=Path, help="a file instead of standard output")
    for command, call in ((served, "serve"), (checked, "verify"), (exported, "export")):
        command.set_defaults(call=f"miles.cli.session:{call}")

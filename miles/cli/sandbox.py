"""`miles sandbox list | test | reap`: what works here, whether a backend keeps the contract, what was left behind."""

import argparse
import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from miles.errors import ConfigError, SandboxError
from miles.registry import known

if TYPE_CHECKING:
    from miles.sandboxes.base import Backend, Capabilities

__all__ = ["add_commands", "listed", "reap", "test"]

_PROBE_S = 20.0


def add_commands(commands: Any) -> None:
    """The subcommands of `miles sandbox`."""
    sandbox = commands.add_parser("sandbox", help="list, check and clean up sandboxes")
    what = sandbox.add_subparsers(dest="what", required=True)
    every = what.add_parser("list", help="every backend: what it can do here, or what it needs")
    tested = what.add_parser("test", help="check that a live backend keeps the contract, and time it")
    tested.add_argument("backend", help="local, docker, e2b, agentenv, modal, daytona, or module:attr")
    tested.add_argument(
        "--only", action="append", default=[], metavar="CHECK", help="this check alone; may be repeated"
    )
    tested.add_argument("--without", action="append", default=[], metavar="CHECK", help="leave this one out")
    reaped = what.add_parser("reap", help="end what dead owners left behind, now")
    reaped.add_argument("backend", nargs="?", default="local")
    for command, call in ((every, "listed"), (tested, "test"), (reaped, "reap")):
        command.add_argument("--json", action="store_true", help="machine-readable")
        command.add_argument("settings", nargs="*", metavar="key=value", help="settings of [sandbox], as image=…")
        command.set_defaults(call=f"miles.cli.sandbox:{call}")


def _config(backend: str, words: list[str]) -> Any:
    from miles.config import apply_overrides, build
    from miles.sandboxes.pool import SandboxConfig

    return build(SandboxConfig, apply_overrides(SandboxConfig, {"backend": backend}, words))


def listed(options: argparse.Namespace) -> int:
    """One line for each backend."""
    found = asyncio.run(_probe_all(options.settings))
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, told in found.items():
        if "problem" in told:
            print(f"--  {name:10} {told['problem']}")
        else:
            facts = told["capabilities"]
            images = ", ".join(facts["images"]) or "none"
            can = [word for word in ("streams", "users", "snapshot", "ttl") if facts[word]]
            print(f"ok  {name:10} isolation {facts['isolation']}, limits {facts['limits']}; images: {images}")
            print(f"    {'':10} {', '.join(can)}" + (f"; {'; '.join(facts['notes'])}" if facts["notes"] else ""))
    return 0


async def _probe_all(words: list[str]) -> dict[str, Any]:
    from miles.sandboxes.pool import make_backend

    found: dict[str, Any] = {}
    for name in known("sandboxes"):
        try:
            backend = make_backend(_config(name, words))
            try:
                capabilities = await asyncio.wait_for(backend.probe(), _PROBE_S)
                found[name] = {"capabilities": asdict(capabilities)}
            finally:
                await backend.close()
        except (SandboxError, ConfigError, TimeoutError) as error:
            found[name] = {"problem": str(error) or f"no answer within {_PROBE_S:g} s"}
    return found


def test(options: argparse.Namespace) -> int:
    """A table of what was checked; the status tells whether all of it holds."""
    return asyncio.run(_test(options))


async def _test(options: argparse.Namespace) -> int:
    from miles.sandboxes.contract import CHECKS, Found, run_contract
    from miles.sandboxes.pool import image_of, make_backend

    if wrong := [name for name in (*options.only, *options.without) if name not in CHECKS]:
        raise ConfigError(f"there is no check {wrong[0]!r}; there are: {', '.join(CHECKS)}")
    config = _config(options.backend, options.settings)
    backend = make_backend(config)

    def tell(found: Found) -> None:
        if not options.json:
            seconds = f"{found.seconds:7.2f} s" if found.status != "left out" else " " * 9
            print(f"{found.status:9} {found.name:28} {seconds}  {found.detail}".rstrip(), flush=True)

    try:
        image = image_of(config.image)
        chosen = {"only": options.only, "leave_out": options.without}
        report = await run_contract(backend, image=image, tell=tell, **chosen)
    finally:
        await backend.close()
    if options.json:
        print(json.dumps({**asdict(report), "failed": len(report.failed)}, indent=1))
    else:
        print(_summary(report.capabilities, report.latencies_ms))
        passed = sum(found.status == "ok" for found in report.checks)
        print(f"{options.backend}: {passed} of {len(report.checks)} checks hold, {len(report.failed)} failed")
    return 1 if report.failed else 0


def _summary(capabilities: "Capabilities", latencies_ms: dict[str, float]) -> str:
    times = ", ".join(f"{name} {value:g}" for name, value in latencies_ms.items())
    facts = f"isolation {capabilities.isolation}, limits {capabilities.limits}"
    return f"{facts}" + (f"; milliseconds: {times}" if times else "")


def reap(options: argparse.Namespace) -> int:
    """How many machines were ended."""
    from miles.sandboxes.pool import make_backend

    count, left = asyncio.run(_reap(make_backend(_config(options.backend, options.settings))))
    if options.json:
        print(json.dumps({"reaped": count, "alive": left}))
    else:
        print(f"{options.backend}: {count} reaped, {left} alive")
    return 0


async def _reap(backend: "Backend") -> tuple[int, int]:
    try:
        await backend.probe()
        count = await backend.reap()
        return count, len(await backend.machines())
    finally:
        await backend.close()

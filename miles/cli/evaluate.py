"""`miles eval ENV`: play tasks with a model, and say how well it does."""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from miles.errors import ConfigError

__all__ = ["add_commands", "run"]


def add_commands(commands: Any) -> None:
    """The command `miles eval`, also as `miles env eval`."""
    command = commands.add_parser("eval", help="play an environment with a model: reward, pass@k, outcomes, timings")
    command.add_argument("env", nargs="?", default="", help="a declared or built-in environment, or module:attr")
    command.add_argument("settings", nargs="*", metavar="section.key=value", help="settings, as env.settings.count=8")
    command.add_argument("--harness", default="", help="a harness (default: the environment's)")
    command.add_argument("--sandbox", default="", help="a sandbox backend (default: local)")
    command.add_argument("--model", default="", help="URL of an SGLang server, a model directory, or scripted:FILE")
    command.add_argument("-n", type=int, default=None, metavar="TASKS", help="tasks (default: 20)")
    command.add_argument("-k", type=int, default=None, metavar="ATTEMPTS", help="attempts at each (default: 1)")
    command.add_argument("--split", default="", help="which tasks (default: test)")
    command.add_argument("--resume", type=Path, default=None, metavar="FOLDER", help="go on with an evaluation")
    command.add_argument("--rescore", type=Path, default=None, metavar="FOLDER", help="score kept episodes again")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(call="miles.cli.evaluate:run")


def run(options: argparse.Namespace) -> int:
    """Status 1 when not one episode could be scored."""
    from miles.config import apply_overrides, build, read_toml
    from miles.recipes.evaluate import EvaluateConfig, evaluate, rescore
    from miles.runs import RunFolder

    kept = options.resume or options.rescore
    words = list(options.settings)
    if kept is not None and "=" in options.env:
        words.insert(0, options.env)
        options.env = ""
    folder = RunFolder.open(kept) if kept is not None else None
    data: dict[str, Any] = read_toml(folder.config) if folder is not None else {}
    for key, value in _named(options).items():
        words.append(f"{key}={value}")
    if not options.env and folder is None:
        raise ConfigError("which environment? `miles env list` and `miles env search` show them")
    if folder is None and not options.model:
        raise ConfigError("which model? --model URL, a model directory, or scripted:FILE")
    config = build(EvaluateConfig, apply_overrides(EvaluateConfig, data, words))
    if options.rescore is not None:
        assert folder is not None
        summary = asyncio.run(rescore(folder, config))
    else:
        try:
            folder, summary = asyncio.run(evaluate(config, _teller(options.json), folder))
        except KeyboardInterrupt:
            print("stopped; what was done is kept: miles eval --resume FOLDER goes on", file=sys.stderr)
            raise
    if options.json:
        print(json.dumps({"folder": str(folder.path), **summary}))
    else:
        print(table(config.env.name, summary))
        print(f"kept in {folder.path}; again: miles eval --rescore {folder.path}")
    return 0 if summary["reward"] is not None else 1


def _named(options: argparse.Namespace) -> dict[str, Any]:
    named = {
        "env.name": options.env,
        "harness.name": options.harness,
        "sandbox.backend": options.sandbox,
        "model": options.model,
        "tasks": options.n,
        "attempts": options.k,
        "split": options.split,
    }
    return {key: value for key, value in named.items() if value not in ("", None)}


def _teller(quiet: bool) -> Any:
    began = time.monotonic()

    def tell(done: int, total: int, episode: Any) -> None:
        outcome = episode.outcome
        how = f"{outcome.reward:.3f}" if outcome.kind == "scored" else f"{outcome.kind}: {outcome.reason}"
        if outcome.kind == "discarded":
            how += f" ({outcome.detail.strip().splitlines()[-1][:160] if outcome.detail.strip() else ''})"
        print(
            f"[{time.monotonic() - began:6.1f}s] {done}/{total}  {episode.task_id}  {how}", file=sys.stderr, flush=True
        )

    return (lambda *_: None) if quiet else tell


def table(name: str, summary: dict[str, Any]) -> str:
    """For people."""
    reward, (low, high) = summary["reward"], summary["interval"]
    lines = [f"{name}: {summary['tasks']} tasks, {summary['episodes']} episodes, {summary['turns']:.1f} turns each"]
    if reward is None:
        lines.append("  reward      none of them could be scored")
    else:
        between = "" if low is None else f"   95 % between {low:.3f} and {high:.3f}"
        lines.append(f"  reward      {reward:.3f}{between}")
    passed = {k: value for k, value in summary["pass"].items() if value is not None}
    lines.append("  pass@k      " + "   ".join(f"{k}: {value:.3f}" for k, value in passed.items()))
    lines.append("  outcomes    " + "   ".join(f"{kind}: {count}" for kind, count in summary["outcomes"].items()))
    if summary["parts"]:
        lines.append("  parts       " + "   ".join(f"{part}: {value:.3f}" for part, value in summary["parts"].items()))
    seconds = summary["seconds_by_phase"].items()
    lines.append("  seconds     " + "   ".join(f"{phase}: {value:.2f}" for phase, value in seconds) + "   (medians)")
    return "\n".join(lines)

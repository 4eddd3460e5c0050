"""`miles recipe …` and `miles runs …`: read files, print them."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from miles.cli.progress import sparkline
from miles.config import build, dump_toml, read_toml
from miles.errors import ConfigError
from miles.recipes.config import RunConfig, is_offline, list_recipes, recipe_path
from miles.recipes.offline import OfflineRun
from miles.runs import RunFolder, list_runs

__all__ = ["recipe_list", "recipe_show", "runs_list", "runs_save", "runs_show"]

_COLUMNS = ("step", "reward/mean", "staleness/max", "loss", "grad_norm", "logprob_diff/max", "tokens_per_s")


def recipe_list(options: argparse.Namespace) -> int:
    """Names and descriptions."""
    for name, description in list_recipes():
        print(f"{name:20} {description}")
    return 0


def recipe_show(options: argparse.Namespace) -> int:
    """A recipe with every default filled in."""
    data = read_toml(recipe_path(options.recipe))
    print(dump_toml(build(OfflineRun, data) if is_offline(data) else build(RunConfig, data)), end="")
    return 0


def runs_list(options: argparse.Namespace) -> int:
    """One line a run."""
    rows = [_summary(run) for run in list_runs(options.root)]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print(f"no runs in {options.root}; `miles launch quickstart` makes one")
        return 0
    cells = [list(rows[0]), *(["-" if value is None else str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:  # whole names, so that they can be copied from a pipe or a narrow terminal
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def runs_save(options: argparse.Namespace) -> int:
    """Ask a run that is going on for a checkpoint, and wait until it is there."""
    run = _find(options.root, options.run)
    before = set(run.checkpoints())
    if run.metrics("end"):
        newest = f"its newest checkpoint is {max(before)}" if before else "it has no checkpoint"
        raise ConfigError(f"{run.path} has ended; {newest}")
    run.wish_to_save()
    print(f"asked {run.path.name}; it writes after its present step (not in a warm start)", flush=True)
    deadline = time.monotonic() + options.wait
    while not (new := set(run.checkpoints()) - before):
        if run.metrics("end") or time.monotonic() > deadline:
            run.take_wish_to_save()
            raise ConfigError(f"{run.path} wrote no checkpoint: is it running? `--wait SECONDS` waits longer")
        time.sleep(0.2)
    print(f"checkpoint {max(new)} (loadable model in hf/)")
    return 0


def runs_show(options: argparse.Namespace) -> int:
    """All that is known of one run."""
    run = _find(options.root, options.run)
    steps, evaluations = run.metrics("step"), run.metrics("eval")
    everything = {
        **_summary(run),
        "config": read_toml(run.config),
        "steps": steps,
        "evaluations": evaluations,
        "outcomes": _outcomes(steps),
        "checkpoints": [str(path) for path in run.checkpoints()],
    }
    if options.json:
        print(json.dumps(everything, indent=1))
        return 0
    print(f"{run.path}\nrecipe {everything['recipe']}, {everything['state']}, step {everything['step']}")
    for line in evaluations:
        print(f"held-out success {_number(line['reward'])} at version {line['version']} ({line['episodes']} episodes)")
    for line in run.metrics("held_out"):
        print(f"held-out loss {_number(line['loss'])} at step {line['step']}")
    if steps:
        rewards = [float(step["reward/mean"]) for step in steps]
        print(f"reward {sparkline(rewards)} {rewards[0]:.2f} -> {rewards[-1]:.2f}")
        print("outcomes " + ", ".join(f"{name} {count}" for name, count in everything["outcomes"].items()))
        print(" ".join(f"{name.rpartition('/')[0] or name:>12}" for name in _COLUMNS))
        for step in steps[:: max(1, len(steps) // 12)]:
            print(" ".join(f"{_number(step.get(name)):>12}" for name in _COLUMNS))
        last = {k: v for k, v in steps[-1].items() if isinstance(v, int | float) and k != "time"}
        print("last step " + "  ".join(f"{name}={value:.4g}" for name, value in last.items()))
    for path in everything["checkpoints"]:
        print(f"checkpoint {path} (loadable model in hf/)")
    print(f"config {run.config}; episodes {run.path / 'episodes'}")
    if (run.path / "reward.png").exists():
        print(f"plot {run.path / 'reward.png'}")
    return 0


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def _find(root: Path, name: str) -> RunFolder:
    for path in (Path(name), root / name):
        if (path / "config.toml").is_file():
            return RunFolder.open(path)
    known = ", ".join(run.path.name for run in list_runs(root)[-5:]) or "none"
    raise ConfigError(f"no run {name!r}; newest in {root}: {known}")


def _summary(run: RunFolder) -> dict[str, Any]:
    steps = run.metrics("step") or run.metrics("supervised")
    evaluations, ends = run.metrics("eval"), run.metrics("end")
    state = "running or cut off"
    if ends:
        state = "failed" if "error" in ends[-1] else "stopped" if ends[-1]["stopped"] else "finished"
    rewards = [line["reward"] for line in evaluations]
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.config.stat().st_mtime))
    return {
        "run": run.path.name,
        "recipe": read_toml(run.config).get("name"),
        "started": started,
        "state": state,
        "step": steps[-1]["step"] if steps else 0,
        "held-out first": rewards[0] if rewards else None,
        "held-out last": rewards[-1] if rewards else None,
    }


def _outcomes(steps: list[dict[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for step in steps:
        for name, value in step.items():
            if name.startswith(("outcome/", "discarded/")):
                counts[name] = counts.get(name, 0) + int(value)
    return counts

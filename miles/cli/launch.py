"""`miles launch`."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from miles.cli.progress import make_reporter
from miles.config import apply_overrides, build, dump_toml, read_toml
from miles.errors import ConfigError
from miles.recipes.compose import check_plugins, resume
from miles.recipes.compose import launch as launch_run
from miles.recipes.config import RunConfig, is_offline, recipe_path, smoked
from miles.recipes.offline import OfflineRun, check, launch_offline, resume_offline
from miles.recipes.placement import place
from miles.runs import RunFolder
from miles.types import Reporter

__all__ = ["launch"]


def launch(options: argparse.Namespace) -> int:
    """Train, or go on training."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if options.resume is not None:
        overrides = [text for text in (options.recipe, *options.overrides) if text is not None]
        if overrides and "=" not in overrides[0]:
            raise ConfigError("give either a recipe or --resume RUN: a resumed run keeps its own recipe")
        named = Path("runs") / options.resume  # a name, as `miles runs list` shows it
        folder = RunFolder.open(named if (named / "config.toml").is_file() else options.resume)
        data = read_toml(folder.config)
    elif options.recipe is not None and "=" not in options.recipe:
        folder, overrides = None, options.overrides
        data = read_toml(recipe_path(options.recipe))
        data = smoked(data) if options.smoke else data
    else:
        raise ConfigError("which recipe? `miles recipe list` shows them")
    config: RunConfig | OfflineRun
    if is_offline(data):
        config = build(OfflineRun, apply_overrides(OfflineRun, data, overrides))
    else:
        config = build(RunConfig, apply_overrides(RunConfig, data, overrides))
    if options.dry_run:
        check(config) if isinstance(config, OfflineRun) else check_plugins(config)
        print(dump_toml(config), end="")
        placement = place(config) if isinstance(config, RunConfig) else None
        for line in placement.lines() if placement else ():
            print(f"# {line}")
        return 0
    with make_reporter(plain=options.plain) as reporter:
        try:
            asyncio.run(_run(folder, config, reporter))
        except asyncio.CancelledError:
            return 130
    return 0


async def _run(folder: RunFolder | None, config: RunConfig | OfflineRun, reporter: Reporter) -> None:
    if isinstance(config, OfflineRun):
        await (launch_offline(config, reporter) if folder is None else resume_offline(folder, config, reporter))
    else:
        await (launch_run(config, reporter) if folder is None else resume(folder, config, reporter))

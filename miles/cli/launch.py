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
from miles.recipes.config import RunConfig, load_recipe
from miles.runs import RunFolder

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
        config = build(RunConfig, apply_overrides(RunConfig, read_toml(folder.config), overrides))
    elif options.recipe is not None and "=" not in options.recipe:
        config = load_recipe(options.recipe, options.overrides)
    else:
        raise ConfigError("which recipe? `miles recipe list` shows them")
    if options.dry_run:
        check_plugins(config)
        print(dump_toml(config), end="")
        return 0
    with make_reporter(plain=options.plain) as reporter:
        try:
            run = resume(folder, config, reporter) if options.resume is not None else launch_run(config, reporter)
            asyncio.run(run)
        except asyncio.CancelledError:
            return 130
    return 0

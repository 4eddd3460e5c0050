"""Recipes that learn from a file: supervised fine-tuning and preferences. Composes trainer and driver, no engine."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.errors import ConfigError, SessionError
from miles.recipes.config import Recipe
from miles.recipes.running import Running, begun, ctrl_c, rescue, resumed
from miles.recipes.tiny_model import describe
from miles.registry import resolve
from miles.rollout.rendering.families import check_tokenizer, load_rendering
from miles.rollout.rendering.rendering import Rendering
from miles.runs import RunFolder
from miles.trainer.checkpoints import read_state
from miles.trainer.data.rows import Row, demonstration_row
from miles.trainer.offline import OfflineConfig, OfflineDriver, Unit
from miles.trainer.trainer import Trainer, TrainerConfig
from miles.types import Reporter

__all__ = ["OfflineRun", "launch_offline", "read_units", "resume_offline"]


class OfflineRun(Recipe):
    """A recipe that learns from a file; it begins with model.path."""

    offline: OfflineConfig
    """The file and the loss."""
    trainer: TrainerConfig = TrainerConfig()
    """Ranks and backend."""


async def launch_offline(config: OfflineRun, reporter: Reporter) -> RunFolder:
    """A new run over the whole file. Raises MilesError when it cannot go on."""
    model = check(config)
    with begun(config) as folder:
        await _go(config, model, folder, reporter, checkpoint=None)
    return folder


async def resume_offline(folder: RunFolder, config: OfflineRun, reporter: Reporter) -> RunFolder:
    """Go on from the newest checkpoint, in the same pass over the file."""
    model = check(config)
    with resumed(folder, config, config.trainer, critic=False) as checkpoint:
        await _go(config, model, folder, reporter, checkpoint=checkpoint)
    return folder


def check(config: OfflineRun) -> Path:
    """The model directory, if everything that the recipe names is there."""
    resolve("trainers", config.trainer.backend)
    if config.model.path is None:
        raise ConfigError("a recipe with [offline] begins with a model: set model.path")
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path={config.model.path} is not a model directory (no config.json)")
    check_tokenizer(config.model.path)
    if not config.offline.path.is_file():
        raise ConfigError(f"offline.path={config.offline.path}: no such file")
    return config.model.path


async def _go(
    config: OfflineRun, model: Path, folder: RunFolder, reporter: Reporter, *, checkpoint: Path | None
) -> None:
    began, running = time.monotonic(), Running()
    with ctrl_c(running, reporter):
        rendering = await asyncio.to_thread(load_rendering, model)
        units = await asyncio.to_thread(lambda: list(read_units(config.offline, rendering)))
        dpo = config.offline.loss == "dpo" and config.trainer.compute.lora is None
        others = {"reference": model} if dpo else {}
        async with Trainer(model, folder.logs, config.trainer, seed=config.run.seed, others=others) as trainer:
            step = int(read_state(checkpoint)["step"]) if checkpoint else 0
            driver = OfflineDriver(trainer, units, folder, reporter, config.offline, seed=config.run.seed, step=step)
            running.driver = driver
            if checkpoint is not None:
                await trainer.load(checkpoint)
            facts = {
                "recipe": config.name,
                "file": f"{config.offline.path} ({len(units)} lines, {config.offline.held_out} held out)",
                "loss": config.offline.loss,
                "trainer": f"{config.trainer.backend}, ranks {config.trainer.ranks}",
                "model": describe(model),
                "folder": str(folder.path),
                "from step": step,
            }
            reporter.event("composed", facts)
            try:
                await driver.train()
            except Exception as error:  # whatever ended the run, a checkpoint is worth having
                await rescue(driver, folder, error)
                raise
            await driver.save()
    folder.log("end", {"step": driver.step, "stopped": driver.stop.is_set(), "seconds": time.monotonic() - began})
    reporter.event("end", {"folder": str(folder.path), "stopped": driver.stop.is_set(), "step": driver.step})


def read_units(config: OfflineConfig, rendering: Rendering) -> Iterator[Unit]:
    """The file's lines as rows: one for a conversation, two for a preference. ConfigError names a bad line."""
    rows_of = _conversation if config.loss == "sft" else _preference
    with config.path.open() as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                unit = rows_of(json.loads(line), rendering)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{config.path}, line {number} is not JSON: {error.msg} at column {error.colno}"
                ) from error
            except KeyError as error:
                wanted = f"offline.loss={config.loss} wants {_WANTED[config.loss]}"
                raise ConfigError(f"{config.path}, line {number} has no {error}; {wanted}") from error
            except (ValueError, TypeError, AttributeError, SessionError) as error:
                raise ConfigError(f"{config.path}, line {number} cannot be read as a conversation: {error}") from error
            if not all(row.n_owned for row in unit):
                raise ConfigError(f"{config.path}, line {number}: no assistant message to learn from")
            yield unit


_WANTED = {
    "sft": 'lines of {"messages": […]}',
    "dpo": 'lines of {"prompt": […], "chosen": […], "rejected": […]}',
}


def _conversation(data: dict[str, Any], rendering: Rendering) -> Unit:
    return (_row(data["messages"], data.get("tools") or [], rendering),)


def _preference(data: dict[str, Any], rendering: Rendering) -> Unit:
    """Chosen and rejected after the same prompt, whose own assistant messages are only context."""
    prompt = [{**message, "train": False} for message in data["prompt"]]
    tools = data.get("tools") or []
    return tuple(_row([*prompt, *data[name]], tools, rendering) for name in ("chosen", "rejected"))


def _row(messages: list[dict[str, Any]], tools: list[dict[str, Any]], rendering: Rendering) -> Row:
    return demonstration_row(*rendering.demonstration(messages, tools))

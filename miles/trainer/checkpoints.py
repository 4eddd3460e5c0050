"""A run's checkpoints: begun between two steps, written beside the next ones, counted when complete."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miles.errors import ConfigError
from miles.runs import RunFolder
from miles.trainer.trainer import Trainer, TrainerConfig
from miles.types import Group, from_json, to_json

__all__ = ["Checkpoints", "check_same_models", "read_state"]

_GROUPS = "groups.jsonl"


class Checkpoints:
    """Writes one checkpoint at a time; `tell` hears of each that is complete."""

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        *,
        keep: int,
        tell: Callable[[str, Mapping[str, Any]], None],
        every: int = 0,
    ) -> None:
        self._trainer, self._folder, self._keep, self._tell, self._every = trainer, folder, keep, tell, every
        self._open: tuple[Path, dict[str, Any]] | None = None

    def due(self, step: int) -> bool:
        """Whether one should be written after `step`: by the clock of steps, or since somebody asked."""
        wished = self._folder.take_wish_to_save()
        return wished or bool(self._every and step % self._every == 0)

    async def begin(self, step: int, state: Mapping[str, Any], *, wait: bool) -> Path | None:
        """Copy what is needed and begin to write it; its path if `wait`. A key `source.groups` holds groups."""
        await self.complete(wait=True)
        partial = self._folder.new_checkpoint(step)
        source = dict(state.get("source") or {})
        groups: list[Group] = list(source.pop("groups", ()))
        path = partial / _GROUPS
        await asyncio.to_thread(self._folder.guarded, path, lambda: _write_groups(path, groups))
        await self._trainer.save(partial)
        self._open = partial, {**state, "source": source, "models": _models(self._trainer)}
        return await self.complete(wait=wait)

    async def complete(self, *, wait: bool = False) -> Path | None:
        """Make the checkpoint count that was begun last, once all of it is written."""
        opened, self._open = self._open, None  # one that could not be written must never count
        if opened is None:
            return None
        if not await self._trainer.saved(wait=wait):
            self._open = opened
            return None
        partial, state = opened
        path = self._folder.finish_checkpoint(partial, state, keep=self._keep)
        self._tell("checkpoint", {"step": state["step"], "path": str(path)})
        return path


def check_same_models(state: Mapping[str, Any], config: TrainerConfig, *, critic: bool) -> None:
    """Whether a checkpoint can be loaded into what `config` makes; ConfigError names the setting that changed."""
    saved = state.get("models")
    if saved is None:
        return
    lora = config.compute.lora.model_dump(mode="json") if config.compute.lora else None
    if saved["lora"] != lora:
        raise ConfigError(
            f"the checkpoint was written with trainer.compute.lora={saved['lora']}, not {lora}: resume with the same, "
            "or start a new run with model.path set to the checkpoint's hf/ folder"
        )
    if critic and not saved["critic"]:
        raise ConfigError(
            "the checkpoint has no critic, which train.advantage.estimator=gae needs: start a new run with "
            "model.path set to the checkpoint's hf/ folder"
        )


def _models(trainer: Trainer) -> dict[str, Any]:
    lora = trainer.config.compute.lora
    return {"lora": lora.model_dump(mode="json") if lora else None, "critic": "critic" in trainer.info}


def _write_groups(path: Path, groups: list[Group]) -> None:
    with path.open("wb") as file:
        for group in groups:
            file.write(to_json(group) + b"\n")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The driver's part of a checkpoint: step, data cursor, groups that were finished and not trained yet."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    path = checkpoint / _GROUPS
    lines = path.read_bytes().splitlines() if path.exists() else []
    if isinstance(state.get("source"), dict):
        state["source"]["groups"] = [from_json(Group, line) for line in lines]
    return state

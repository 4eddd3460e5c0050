"""Checkpoints of one model: parameters and moments by torch.distributed.checkpoint, generators by rank.

Writing goes on in the background on copies, in a process group of its own, while the next steps are computed. Any
number of ranks can read what any other number wrote.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save

from miles.errors import TrainerError
from miles.trainer.model.optim import Optimizer
from miles.trainer.settings import OptimConfig

__all__ = ["load", "save"]

_groups: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()


def save(directory: Path, model: Any, optimizer: Optimizer | None, phase: str, *, rank: int) -> "Future[Any]":
    """Copy, then write in the background; the result is done when this rank's part lies in `directory`."""
    extra: dict[str, Any] = {"rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        extra["cuda_rng"] = torch.cuda.get_rng_state()
    if optimizer is not None:
        extra |= {"optim": optimizer.config.model_dump(), "steps": optimizer.steps, "phase": phase}
    torch.save(extra, directory / f"rank{rank}.pt")
    future: Future[Any] = async_save(  # type: ignore[assignment]
        _state(model, optimizer), checkpoint_id=str(directory / "dcp"), process_group=_own_group(model)
    )
    return future


def load(directory: Path, model: Any, *, rank: int, world: int) -> tuple[Optimizer | None, str]:
    """Read parameters, moments and, on as many ranks as wrote, generators; (optimizer, its loss)."""
    mine = directory / f"rank{rank}.pt"
    same = mine.exists() and not (directory / f"rank{world}.pt").exists()
    extra = torch.load(mine if mine.exists() else directory / "rank0.pt", weights_only=True)
    optimizer, phase = None, ""
    if "optim" in extra:
        optimizer, phase = Optimizer(model.named_parameters(), OptimConfig(**extra["optim"])), extra["phase"]
        optimizer.steps = extra["steps"]
        if optimizer.steps:  # moments exist from the first update on
            optimizer.fill()
    try:
        state = _state(model, optimizer)
        written = FileSystemReader(directory / "dcp").read_metadata().state_dict_metadata
        if "optim" in state:  # a parameter that never had a gradient has no moments
            state["optim"] = {key: value for key, value in state["optim"].items() if f"optim.{key}" in written}
        load_sharded(state, checkpoint_id=str(directory / "dcp"))
    except (CheckpointException, FileNotFoundError) as error:
        raise TrainerError(f"checkpoint {directory} cannot be read: {error}; resume from an older one") from error
    set_model_state_dict(model, state["model"])
    if same:
        torch.set_rng_state(extra["rng"])
        if "cuda_rng" in extra and torch.cuda.is_available():
            torch.cuda.set_rng_state(extra["cuda_rng"])
    return optimizer, phase


def _own_group(model: Any) -> Any:
    """Collectives of the background must not meet those of the next step, nor those of another model's save."""
    if model not in _groups:
        _groups[model] = dist.new_group(backend="gloo")
    return _groups[model]


def _state(model: Any, optimizer: Optimizer | None) -> dict[str, Any]:
    """Everything sharded, by name. Optimizer tensors are written and read in place."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        names = {id(p): name for name, p in model.named_parameters()}
        state["optim"] = {
            f"{names[id(p)]}.{key}": value
            for part in optimizer.parts
            for p, moments in part.state.items()
            for key, value in moments.items()
            if isinstance(value, Tensor)
        }
    return state

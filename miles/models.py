"""Hugging Face models: loading directories from any thread, and the names that their files use for live tensors."""

import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from miles.errors import ConfigError

__all__ = ["CheckpointWriter", "checkpoint_tensors", "load_model"]

# Transformers patches torch's initialisers process-wide while it builds a model: two loads at once in one
# process can leave weights random, and the patch in place for good.
_ONE_AT_A_TIME = threading.Lock()


def load_model(directory: Path | str) -> Any:
    """The causal language model in a Hugging Face directory, in float32 on the CPU, with SDPA attention."""
    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(f"{directory} is not a model directory: it has no config.json")
    with _ONE_AT_A_TIME:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")


def checkpoint_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names of a checkpoint's files: live mixtures of experts hold all experts of a layer as one tensor.

    Give all tensors of a layer together. Inference servers know only the files' names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return found


class CheckpointWriter:
    """Writes tensors, by their names in checkpoint files, into a live model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._own: dict[str, torch.Tensor] = model.state_dict()

    @cached_property
    def _places(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Where parts of larger tensors lie; found when the first one comes: most models have none."""
        places: dict[str, tuple[str, torch.Tensor]] = {}
        for name, tensor in self._own.items():
            if set(checkpoint_tensors(self._model, {name: tensor.to("meta")})) != {name}:
                numbers = torch.arange(tensor.numel()).view(tensor.shape)
                parts = checkpoint_tensors(self._model, {name: numbers})
                places |= {part: (name, at.flatten()) for part, at in parts.items()}
        return places

    def knows(self, name: str) -> bool:
        return name in self._own or name in self._places

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to where it belongs."""
        if name in self._own:
            self._own[name].copy_(tensor)
            return
        whole, at = self._places[name]
        flat = self._own[whole].view(-1)
        flat[at.to(flat.device)] = tensor.flatten().to(flat.device, flat.dtype)

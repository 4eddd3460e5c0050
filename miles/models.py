"""Loading Hugging Face model directories, from any thread."""

import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from miles.errors import ConfigError

__all__ = ["load_model"]

# Transformers patches torch's initialisers process-wide while it builds a model: two loads at once in one
# process can leave weights random, and the patch in place for good.
_ONE_AT_A_TIME = threading.Lock()


def load_model(directory: Path | str) -> Any:
    """The causal language model in a Hugging Face directory, in float32 on the CPU, with SDPA attention."""
    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(f"{directory} is not a model directory: it has no config.json")
    with _ONE_AT_A_TIME:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")

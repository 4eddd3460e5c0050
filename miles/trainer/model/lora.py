"""Low-rank adapters by peft, injected into the model: they train, the weights below stay."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.errors import ConfigError
from miles.trainer.settings import LoraConfig

__all__ = ["adapter_tensors", "inject", "merged_weights", "without_adapter", "write_adapter"]

_PREFIX = "base_model.model."
"""What peft puts before every name in an adapter file."""


def inject(model: Any, config: LoraConfig) -> None:
    """Add an adapter in place and freeze everything else. ConfigError when peft or a target is missing."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError("trainer.compute.lora needs `pip install miles-hub[lora]`") from error
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets), lora_dropout=0.0, bias="none"
    )
    try:
        peft.inject_adapter_in_model(settings, model, adapter_name=config.name)
    except ValueError as error:
        raise ConfigError(f"trainer.compute.lora.targets do not fit this model: {error}") from error


@contextlib.contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """The first weights: what KL and preferences are measured against, without a second model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_tensors(model: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """(peft's name, full tensor) of one adapter."""
    for full_name, parameter in model.named_parameters():
        if ".lora_" in full_name and f".{name}." in full_name:
            yield _PREFIX + full_name.replace(f".{name}.", "."), _full(parameter)


def merged_weights(model: Any, config: LoraConfig | None) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of every weight, an adapter's update added: W + alpha/r * B A."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if ".lora_" in name:
            continue
        full = _full(parameter)
        stem = name.removesuffix(".base_layer.weight")
        if config is not None and f"{stem}.lora_A.{config.name}.weight" in parameters:
            a = _full(parameters[f"{stem}.lora_A.{config.name}.weight"]).float()
            b = _full(parameters[f"{stem}.lora_B.{config.name}.weight"]).float()
            full = (full.float() + config.alpha / config.rank * (b @ a)).to(full.dtype)
        yield name.replace(".base_layer.", "."), full


def write_adapter(directory: Path, tensors: dict[str, Tensor], config: LoraConfig, base: str) -> None:
    """Fill a directory with an adapter in peft's format: what peft, transformers and SGLang load."""
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(config.targets),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2))


def _full(parameter: Tensor) -> Tensor:
    full: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach()

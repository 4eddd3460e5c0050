"""Models that come as one GGUF file, in a Python package for instance: made into a Hugging Face directory once."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from miles.errors import ConfigError

__all__ = ["convert", "find"]


def find(name: str) -> Path:
    """The file of `model.gguf`: a path, or PACKAGE:FILE for a file inside an installed package."""
    package, colon, file = name.partition(":")
    if not colon:
        path = Path(name)
    else:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"model.gguf={name}: the package {package!r} is not installed: pip install {package}")
        path = Path(next(iter(spec.submodule_search_locations))) / file
    if not path.is_file():
        raise ConfigError(f"model.gguf={name}: there is no file {path}")
    return path


def convert(file: Path, directory: Path) -> None:
    """Write the model, in bfloat16, and its tokenizer. ConfigError without the reader of the format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("model.gguf needs the reader of the format: pip install 'miles-hub[gguf]'")
    disable_progress_bar()
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    options: dict[str, Any] = {"gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **options)
    model.is_quantized, model.hf_quantizer = False, None  # its weights were unpacked; it is like any other now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(partial)
    partial.replace(directory)

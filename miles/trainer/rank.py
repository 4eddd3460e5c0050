"""What runs inside a trainer rank: the process group, the backend, files written by rank 0."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from miles.registry import resolve
from miles.trainer.backend import Backend
from miles.trainer.rows import Row
from miles.trainer.settings import BackendConfig, OptimConfig, StepSpec

__all__ = ["TrainerRank"]

_TOKENIZER_FILES = (
    "tokenizer",
    "special_tokens",
    "vocab",
    "merges",
    "chat_template",
    "added_tokens",
    "generation_config",
)


class TrainerRank:
    """One rank of the trainer; its methods are called on all ranks together."""

    def __init__(
        self, *, model: str, backend: str, config: BackendConfig, rank: int, world: int, rendezvous: str, seed: int = 0
    ) -> None:
        os.environ["LOCAL_RANK"] = str(rank)
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
        dist.init_process_group(kind, init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        self._source, self._rank = Path(model), rank
        try:
            self._backend: Backend = resolve("trainers", backend)()
            self._backend.init(self._source, config, rank=rank, world=world, seed=seed)
        except BaseException:
            self.close()  # the next trainer of this process may have a group of its own
            raise

    def step(self, batches: Sequence[Sequence[Row]], spec: StepSpec, optim: OptimConfig) -> dict[str, float]:
        """One optimizer step on this rank's micro-batches; the same metrics on every rank."""
        return self._backend.step(batches, spec, optim)

    def score(self, batches: Sequence[Sequence[Row]], temperature: float) -> list[list[list[float]]]:
        """Logprobs of this rank's rows."""
        return self._backend.score(batches, temperature=temperature)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Full weights by HF name, on the CPU: for engines in the same process."""
        return {name: tensor.cpu().contiguous() for name, tensor in self._backend.weights()}

    def export(self, directory: str) -> None:
        """Write a Hugging Face model directory (weights, config, tokenizer) that anything can load."""
        weights = self.tensors()
        if self._rank != 0:
            return
        target = Path(directory)
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((self._source / "config.json").read_text())
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        for path in self._source.iterdir():
            if path.name.startswith(_TOKENIZER_FILES):
                shutil.copy(path, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

    def save(self, directory: str) -> None:
        """Write this rank's part of a checkpoint."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._backend.save(Path(directory))

    def load(self, directory: str) -> None:
        """Restore from a checkpoint."""
        self._backend.load(Path(directory))

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

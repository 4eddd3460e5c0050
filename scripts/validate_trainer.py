"""Whether ways to hold and compute a model agree here: ranks, replicas, layouts, heads, checkpoints, adapters.

    python -m scripts.validate_trainer [--hidden 512] [--layers 8] [--dtype bfloat16] [--ranks 2] [--parts ranks …]

Prints one line for each way: loss, gradient norm and weights after five steps against the first way of its part. Uses
GPUs where there are any, else gloo on CPUs.
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import SPEC, qwen3, row, scaled
from miles.trainer.data.rows import Row
from miles.trainer.settings import BackendConfig, LoraConfig, OptimConfig
from miles.trainer.trainer import Trainer, TrainerConfig

OPTIM = OptimConfig(lr=1e-5)
STEPS = 5


def batch(seed: int, vocabulary: int) -> list[Row]:
    """Two groups of eight answers of different lengths, each group below one prompt."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(vocabulary) for _ in range(200)] for _ in range(2)]
    rows = [
        row(prompts[n // 8] + [dice.randrange(vocabulary) for _ in range(40 + 17 * (n % 8))], 200, n) for n in range(16)
    ]
    return scaled(rows)


class Check:
    """One model, many ways; remembers the first of each part to compare with."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.model = qwen3(folder / "m", hidden=options.hidden, layers=options.layers, vocabulary=options.vocabulary)
        self.failed = False

    async def way(self, name: str, first: Any, *, ranks: int = 1, **compute: Any) -> Any:
        """Five steps one way; prints how far it is from `first` (None: this is it)."""
        settings = {"dtype": self.options.dtype, "micro_tokens": 2048, **compute}
        config = TrainerConfig(ranks=ranks, compute=BackendConfig(**settings))
        async with Trainer(self.model, self.folder, config) as trainer:
            began, norms, losses = 0.0, [], []
            for seed in range(STEPS):
                began = time.perf_counter()
                metrics = await trainer.step(batch(seed, self.options.vocabulary), SPEC, OPTIM)
                losses.append(metrics["loss"])
                norms.append(metrics["grad_norm"])
            seconds = time.perf_counter() - began
            out = await trainer.export(self.folder / "out")
            note = trainer.info["policy"].note
        found = (losses, norms, _weights(out))
        self._print(name, found, first or found, seconds, f"packed {metrics['packed']:.0f} {note}")
        return first or found

    def _print(self, name: str, found: Any, first: Any, seconds: float, note: str) -> None:
        loss = max(abs(a - b) for a, b in zip(found[0], first[0], strict=True))
        norm = max(abs(a - b) / max(1e-9, b) for a, b in zip(found[1], first[1], strict=True))
        weights = max(float((found[2][n] - t).abs().max()) for n, t in first[2].items())
        coarse = self.options.dtype == "bfloat16"
        bad = loss > (2e-2 if coarse else 1e-4) or norm > (0.1 if coarse else 1e-2)
        self.failed |= bad
        print(
            f"{name:34} loss {found[0][-1]:.5f} off {loss:.1e}  gradient norm off {norm:.1e}  "
            f"weights off {weights:.1e}  last step {seconds:.3f} s  {note}{'  FAILED' if bad else ''}",
            flush=True,
        )

    async def ranks(self) -> None:
        """One process, several, replicas."""
        n = self.options.ranks
        first = await self.way("1 rank", None)
        await self.way(f"{n} ranks", first, ranks=n)
        await self.way(f"{n} ranks, each a whole copy (HSDP)", first, ranks=n, shard=1)

    async def layouts(self) -> None:
        """Padded rows, tries; what saves memory."""
        first = await self.way("padded rows", None, layout="rows")
        await self.way("tries", first, layout="packed")
        await self.way("activations computed again", first, layout="rows", checkpoint_activations=True)
        await self.way("parameters on the CPU", first, layout="rows", cpu_offload=True)

    async def heads(self) -> None:
        """Chunked logits and the fused kernel."""
        first = await self.way("chunked head", None)
        if torch.cuda.is_available():
            await self.way("liger head", first, head="liger")

    async def checkpoints(self) -> None:
        """Written on several ranks, read on one, and back."""
        n, saved = self.options.ranks, self.folder / "saved"

        def trainer(ranks: int) -> Trainer:
            compute = BackendConfig(dtype=self.options.dtype, micro_tokens=2048)
            return Trainer(self.model, self.folder, TrainerConfig(ranks=ranks, compute=compute))

        for before, after in ((n, 1), (1, n)):
            shutil.rmtree(saved, ignore_errors=True)
            async with trainer(before) as one:
                await one.step(batch(0, self.options.vocabulary), SPEC, OPTIM)
                await one.save(saved)
                expected = await one.step(batch(1, self.options.vocabulary), SPEC, OPTIM)
                await one.saved(wait=True)
            async with trainer(after) as other:
                await other.load(saved)
                found = await other.step(batch(1, self.options.vocabulary), SPEC, OPTIM)
            off = abs(found["grad_norm"] - expected["grad_norm"]) / expected["grad_norm"]
            self.failed |= off > (0.05 if self.options.dtype == "bfloat16" else 1e-3)
            print(
                f"saved on {before} ranks, resumed on {after}: gradient norm of the next step off {off:.1e}", flush=True
            )

    async def adapters(self) -> None:
        """LoRA on one rank and on several."""
        first = await self.way("LoRA, 1 rank", None, lora=LoraConfig(rank=8))
        await self.way(f"LoRA, {self.options.ranks} ranks", first, ranks=self.options.ranks, lora=LoraConfig(rank=8))


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return tensors


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    every = ("ranks", "layouts", "heads", "checkpoints", "adapters")
    parser.add_argument("--parts", nargs="+", choices=every, default=every)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check = Check(Path(folder), options)
        for part in options.parts:
            print(f"-- {part}", flush=True)
            run: Callable[[], Awaitable[None]] = getattr(check, part)
            await run()
    sys.exit(check.failed)


if __name__ == "__main__":
    asyncio.run(main())

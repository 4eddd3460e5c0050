"""Published weights as differences: how many bytes, and how long a receiver needs, against whole snapshots.

    python -m benchmarks.delta_sync [--hidden 256] [--layers 4] [--lr 1e-6 2e-7 1e-5] [--steps 1]

Trains a randomly initialised Qwen3 by random policy gradients, publishes bfloat16 as delta-v1 and whole, and applies
both to a receiver's copy. The share of elements that change is proportional to the learning rate.
"""

import argparse
import asyncio
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.models import SPEC, qwen3, row, scaled
from miles.deltas import LocalCheckpoint
from miles.trainer.settings import BackendConfig, OptimConfig
from miles.trainer.trainer import Trainer, TrainerConfig

VOCABULARY = 2048


async def measured(model: Path, folder: Path, lr: float, steps: int, warm: int) -> dict[str, Any]:
    """Facts of the delta of `steps` steps, after `warm` steps; seconds to apply it and to take a whole snapshot."""
    dice = random.Random(0)
    optim = OptimConfig(lr=lr)

    async def step(trainer: Trainer) -> None:
        rows = [row([dice.randrange(VOCABULARY) for _ in range(32)], 1, n) for n in range(4)]
        await trainer.step(scaled(rows), SPEC, optim)

    async with Trainer(model, folder, TrainerConfig(ranks=0, compute=BackendConfig())) as trainer:
        for _ in range(warm):
            await step(trainer)
        await trainer.delta(0, folder / "v0", folder / "none", dtype="bfloat16", base=-1)
        for _ in range(steps):
            await step(trainer)
        began = time.perf_counter()
        facts = await trainer.delta(1, folder / "v1", folder / "v1.delta", dtype="bfloat16", base=0)
        write_s = time.perf_counter() - began
        began = time.perf_counter()
        await trainer.weights(1, folder / "whole", dtype="bfloat16")
        whole_s = time.perf_counter() - began
    assert facts is not None
    local = LocalCheckpoint(folder / "local")
    local.sync(folder / "v0", ())
    began = time.perf_counter()
    local.sync(folder / "v0", (folder / "v1.delta",))
    apply_s = time.perf_counter() - began
    began = time.perf_counter()
    shutil.copytree(folder / "whole", folder / "copy")
    load_file(folder / "copy" / "model.safetensors")
    load_s = time.perf_counter() - began
    return {**facts, "write_s": write_s, "whole_s": whole_s, "apply_s": apply_s, "load_s": load_s}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, nargs="+", default=[2e-7, 1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps between two versions")
    parser.add_argument("--warm", type=int, default=5, help="steps before the first version")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model = qwen3(Path(root) / "m", hidden=options.hidden, layers=options.layers, vocabulary=VOCABULARY)
        print("lr        changed   bytes of whole   write delta/whole s   apply delta / copy and load whole s")
        for number, lr in enumerate(options.lr):
            folder = Path(root) / str(number)
            folder.mkdir()
            f = await measured(model, folder, lr, options.steps, options.warm)
            print(
                f"{lr:7.0e}  {f['changed'] / f['elements']:7.2%}  {f['bytes'] / f['full_bytes']:14.2%}   "
                f"{f['write_s']:9.3f} {f['whole_s']:9.3f}   {f['apply_s']:9.3f} {f['load_s']:9.3f}"
            )


if __name__ == "__main__":
    asyncio.run(main())

"""Rows merged into token tries against padded rows: forward and backward of the same rows, in turns, in one run.

    python -m benchmarks.tree_packing [--hidden 256] [--layers 2] [--scale 1] [--repeat 3] [--dtype float32]

Prints for four shapes: tokens of the rows, over unique tokens; seconds of a step as rows and packed; their ratio; by
how much the losses differ. With a GPU it runs there, tries with FlexAttention.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.models import SPEC, qwen3, row, scaled
from miles.trainer.data.packing import token_ratio
from miles.trainer.data.rows import Row
from miles.trainer.settings import BackendConfig, OptimConfig
from miles.trainer.trainer import Trainer, TrainerConfig

VOCABULARY = 512


def shapes(scale: int) -> dict[str, list[Row]]:
    """Rows of four kinds of trees."""
    dice = random.Random(0)

    def words(n: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(n * scale)]

    prompt, system, line = words(256), words(512), words(768)
    halves = [line + words(64) for _ in range(2)]
    return {
        "8 answers to one prompt": [row(prompt + words(768), len(prompt), n) for n in range(8)],
        "8 short ones below a long system prompt": [row(system + words(64), len(system), n) for n in range(8)],
        "8 forks at the end of a main line": [row(line + words(128), len(line), n) for n in range(8)],
        "16 leaves of a tree of three levels": [row(halves[n // 8] + words(64), len(halves[0]), n) for n in range(16)],
    }


async def step_s(trainer: Trainer, rows: list[Row], repeat: int) -> tuple[float, float]:
    """(seconds of the quickest of `repeat` steps after one to warm up, loss). The rate is too small to matter."""
    best, optim = float("inf"), OptimConfig(lr=1e-30)
    for attempt in range(repeat + 1):
        began = time.perf_counter()
        metrics = await trainer.step(rows, SPEC, optim)
        if attempt:
            best = min(best, time.perf_counter() - began)
    return best, metrics["loss"]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--scale", type=int, default=1, help="multiplies all lengths")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    found: dict[str, dict[str, tuple[float, float]]] = {}
    cases = {name: scaled(rows) for name, rows in shapes(options.scale).items()}
    with tempfile.TemporaryDirectory() as folder:
        model = qwen3(Path(folder) / "m", hidden=options.hidden, layers=options.layers, vocabulary=VOCABULARY)
        for layout in ("rows", "packed"):
            compute = BackendConfig(layout=layout, micro_tokens=8192 * options.scale, dtype=options.dtype)
            async with Trainer(model, Path(folder), TrainerConfig(ranks=0, compute=compute)) as trainer:
                for name, rows in cases.items():
                    found.setdefault(name, {})[layout] = await step_s(trainer, rows, options.repeat)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "1 CPU thread"
    print(f"Qwen3 {options.layers} x {options.hidden}, {options.dtype}, {device}")
    print(f"{'shape':42} {'tokens':>8} {'/unique':>8} {'rows s':>8} {'packed s':>9} {'faster':>7} {'loss differs':>13}")
    for name, rows in cases.items():
        (plain, loss), (packed, other) = found[name]["rows"], found[name]["packed"]
        tokens = sum(len(row.ids) for row in rows)
        print(
            f"{name:42} {tokens:8} {token_ratio(rows):8.2f} {plain:8.3f} {packed:9.3f} {plain / packed:6.2f}x "
            f"{abs(loss - other):13.1e}"
        )


if __name__ == "__main__":
    asyncio.run(main())

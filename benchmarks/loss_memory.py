"""Peak memory of a training step whose logits exist a chunk at a time, against one that holds them all.

    python -m benchmarks.loss_memory [--tokens 8192] [--vocabulary 32768] [--hidden 64] [--heads plain chunked]

Each variant runs in a process of its own; memory is what the step added to the process (or to the GPU). `--heads liger`
needs a GPU and liger-kernel.
"""

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.models import SPEC, qwen3, row, scaled
from miles.trainer.settings import BackendConfig, OptimConfig
from miles.trainer.trainer import Trainer, TrainerConfig


def peak() -> float:
    """MiB: of the GPU, or the most that this process ever held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


async def variant(head: str, options: argparse.Namespace) -> dict[str, float]:
    """Memory, seconds and loss of one step."""
    dice = random.Random(0)
    rows = [row([dice.randrange(options.vocabulary) for _ in range(options.tokens // 8)], 1, n) for n in range(8)]
    compute = BackendConfig(
        layout="rows",
        micro_tokens=options.tokens,
        head="liger" if head == "liger" else "chunked",
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
    )
    with tempfile.TemporaryDirectory() as folder:
        model = qwen3(Path(folder) / "m", hidden=options.hidden, layers=2, vocabulary=options.vocabulary)
        async with Trainer(model, Path(folder), TrainerConfig(ranks=0, compute=compute)) as trainer:
            backend = trainer._ranks[0]._rank.roles["policy"]  # type: ignore[attr-defined]
            backend.policy.plain = head == "plain"
            before = peak()
            found = {}
            for _ in range(2):
                began = time.perf_counter()
                metrics = await trainer.step(scaled(rows), SPEC, OptimConfig(lr=1e-30))
                found = {"s": time.perf_counter() - began, "loss": metrics["loss"]}
            return {"mib": peak() - before, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", nargs="+", default=["plain", "chunked"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asyncio.run(variant(options.one, options))))
        return
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}: all logits in float32 are ", end="")
    print(f"{options.tokens * options.vocabulary * 4 / 2**20:.0f} MiB")
    first: dict[str, float] = {}
    for head in options.heads:
        command = [sys.executable, "-m", "benchmarks.loss_memory", *sys.argv[1:], "--one", head]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        first = first or found
        print(
            f"{head:8} peak +{found['mib']:7.0f} MiB ({first['mib'] / max(1.0, found['mib']):5.2f}x less than "
            f"{options.heads[0]}), {found['s']:.2f} s, loss {found['loss']:.6f}"
        )


if __name__ == "__main__":
    main()

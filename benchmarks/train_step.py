"""Tokens per second of a training step, against a plain Hugging Face model with FSDP2 in a plain loop.

    python -m benchmarks.train_step [--hidden 256] [--layers 4] [--vocabulary 8192] [--rows 16] [--prompt 192]
                                    [--answer 320]

Same model, same rows, same micro-batches, same optimizer, in turns in one run. The plain loop pads its rows, computes
all logits and takes the loss of the answers. `utilisation` is of the matrix product that this machine manages
(6 * parameters * tokens + 12 * layers * width * tokens^2 of a row, arXiv 2204.02311, appendix B).
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.models import SPEC, qwen3, row, scaled
from miles.models import load_model
from miles.trainer.data.packing import micro_batches
from miles.trainer.data.rows import Row
from miles.trainer.settings import BackendConfig, OptimConfig
from miles.trainer.trainer import Trainer, TrainerConfig

OPTIM = OptimConfig(lr=1e-9)


def plain_loop(model: Path, budget: int, dtype: torch.dtype) -> Callable[[list[Row]], float]:
    """A step as one writes it by hand: pad, all logits, log softmax, gather, clipped ratio, AdamW."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm: Any = load_model(model).to(device)
    mesh = init_device_mesh(device, (1,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in lm.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(lm, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-9, betas=(0.9, 0.95), weight_decay=0.0)

    def step(rows: list[Row]) -> float:
        total = 0.0
        for batch in micro_batches(rows, ranks=1, tokens=budget)[0]:
            width = max(len(one.ids) for one in batch.rows)
            ids = torch.zeros(len(batch.rows), width, dtype=torch.long)
            owned = torch.zeros(len(batch.rows), width, dtype=torch.bool)
            old = torch.zeros(len(batch.rows), width)
            for at, one in enumerate(batch.rows):
                ids[at, : len(one.ids)] = torch.from_numpy(one.ids)
                owned[at, : len(one.ids)] = torch.from_numpy(one.owned)
                old[at, : len(one.ids)][torch.from_numpy(one.owned)] = torch.from_numpy(one.logprobs)
            ids, owned, old = ids.to(device), owned.to(device)[:, 1:], old.to(device)[:, 1:]
            advantages = torch.tensor([[one.advantage] for one in batch.rows], device=device)
            scales = torch.tensor([[one.scale] for one in batch.rows], device=device)
            logits = lm(input_ids=ids).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (logprobs - old).exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
            loss = (torch.where(owned, loss, torch.zeros_like(loss)) * scales).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def peak_flops(dtype: torch.dtype) -> float:
    """Floating-point operations per second of one large matrix product here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = 8192 if device == "cuda" else 1024
    a, b = torch.randn(n, n, dtype=dtype, device=device), torch.randn(n, n, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(8):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("hidden", 256),
        ("layers", 4),
        ("vocabulary", 8192),
        ("rows", 16),
        ("prompt", 192),
        ("answer", 320),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    dice = random.Random(0)

    def words(n: int) -> list[int]:
        return [dice.randrange(options.vocabulary) for _ in range(n)]

    apart = [row(words(options.prompt + options.answer), options.prompt, n) for n in range(options.rows)]
    prompts = [words(options.prompt) for _ in range(max(1, options.rows // 8))]
    groups = [row(prompts[n // 8] + words(options.answer), options.prompt, n) for n in range(options.rows // 8 * 8)]
    with tempfile.TemporaryDirectory() as folder:
        model = qwen3(Path(folder) / "m", hidden=options.hidden, layers=options.layers, vocabulary=options.vocabulary)
        times: dict[str, list[float]] = {"plain loop": [], "Miles": [], "Miles, groups of 8": []}
        compute = BackendConfig(micro_tokens=options.budget, dtype=options.dtype)
        async with Trainer(model, Path(folder), TrainerConfig(ranks=0, compute=compute)) as trainer:
            by_hand = plain_loop(model, options.budget, dtype)
            for _ in range(options.repeat + 1):
                for name, rows in (("plain loop", apart), ("Miles", apart), ("Miles, groups of 8", groups)):
                    began = time.perf_counter()
                    if name == "plain loop":
                        await asyncio.to_thread(by_hand, scaled(rows))
                    else:
                        await trainer.step(scaled(rows), SPEC, OPTIM)
                    times[name].append(time.perf_counter() - began)
            parameters = trainer.info["policy"].parameters
    length = options.prompt + options.answer
    flops = options.rows * (6 * parameters * length + 12 * options.layers * options.hidden * length**2)
    peak = peak_flops(dtype)
    base = min(times["plain loop"][1:])
    print(f"Qwen3 {options.layers} x {options.hidden}, {parameters / 1e6:.1f} M parameters, {options.dtype}", end="")
    print(f", matrix products {peak / 1e9:.0f} GFLOP/s")
    for name, seconds in times.items():
        best = min(seconds[1:])
        tokens = options.rows * length / best
        print(f"{name:20} {tokens:10.0f} tokens/s  {base / best:5.2f}x  utilisation {flops / best / peak:6.1%}")


if __name__ == "__main__":
    asyncio.run(main())

"""Whether a running SGLang server serves what the trainer published: whole, as a difference, as an adapter.

    python -m scripts.validate_publish URL MODEL [--dtype bfloat16]

The server must have been started on the model directory MODEL (`--make` writes a randomly initialised one and stops),
with `--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj`, and see the same file system. After each
publishing it samples, and the trainer scores the same tokens: the two must be near, the next version further away.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.models import SPEC, qwen3, row, scaled
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.engine import SGLangEngine
from miles.trainer.data.rows import Row
from miles.trainer.publish import PublishConfig, Publisher
from miles.trainer.settings import BackendConfig, LoraConfig, OptimConfig
from miles.trainer.trainer import Trainer, TrainerConfig
from miles.types import GenerateRequest, Weights

VOCABULARY = 32000


def rows_of(seed: int) -> list[Row]:
    """Something to train on."""
    dice = random.Random(seed)
    return scaled([row([dice.randrange(VOCABULARY) for _ in range(96)], 32, n) for n in range(8)])


async def sampled(engine: SGLangEngine, name: str, version: int) -> tuple[list[Row], list[float]]:
    """Rows that the engine sampled, with its logprobs; every token must carry `version`."""
    rows = []
    for n in range(8):
        prompt = [random.Random(n).randrange(VOCABULARY) for _ in range(24)]
        found = await engine.generate(
            GenerateRequest(id=f"{name}-{n}", session=f"s{n}", prompt_ids=prompt, max_tokens=32)
        )
        assert set(found.versions) == {version}, (found.versions, version)
        rows.append(row([*prompt, *found.output_ids], len(prompt), n))
        rows[-1].logprobs[:] = [0.0 if value is None else value for value in found.logprobs]
    return rows, [float(x) for r in rows for x in r.logprobs]


async def distance(trainer: Trainer, rows: list[Row], logprobs: list[float]) -> float:
    """Mean difference between the engine's logprobs and the trainer's."""
    scores = await trainer.score(rows)
    return float(np.abs(np.concatenate([s["logprobs"] for s in scores]) - np.array(logprobs)).mean())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", type=Path)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--only", choices=("weights", "adapters"))
    options = parser.parse_args()
    if options.make:
        qwen3(options.model, hidden=1024, layers=4, vocabulary=VOCABULARY)
        return
    engine = SGLangEngine(options.model, Path(), SGLangConfig(urls=(options.url,)))
    await engine.start()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for lora in (None, LoraConfig(rank=8, targets=("q_proj", "v_proj"))):
            if options.only == ("adapters" if lora is None else "weights"):
                continue
            compute = BackendConfig(dtype=options.dtype, lora=lora)
            async with Trainer(options.model, Path(folder), TrainerConfig(compute=compute)) as trainer:
                await engine.load(Weights(version=0, directory=options.model))
                publisher = Publisher(trainer, engine, PublishConfig(kind="delta", dtype="bfloat16"))
                for version in range(3):
                    metrics = await publisher.publish(version)
                    rows, logprobs = await sampled(engine, f"{lora is None}-{version}", version)
                    near = await distance(trainer, rows, logprobs)
                    await trainer.step(rows_of(version), SPEC, OptimConfig(lr=1e-3 if lora is None else 3e-2))
                    far = await distance(trainer, rows, logprobs)
                    bad = near > 0.05 or far < 2 * near
                    failed |= bad
                    what = "adapter" if lora else "whole" if version == 0 else "delta"
                    print(
                        f"{what:8} version {version}: {metrics['publish_bytes'] / 1e6:8.2f} MB, pause "
                        f"{metrics['pause_s']:.2f} s of {metrics['publish_s']:.2f}; engine to trainer {near:.4f}, "
                        f"to the next version {far:.4f}{'  FAILED' if bad else ''}",
                        flush=True,
                    )
                publisher.close()
    await engine.close()
    sys.exit(failed)


if __name__ == "__main__":
    asyncio.run(main())

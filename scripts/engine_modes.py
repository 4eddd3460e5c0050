"""How far an SGLang engine agrees with the trainer and with itself, in each of its modes."""

import argparse
import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.models import row
from miles.config import apply_overrides, build
from miles.recipes.config import EngineSection
from miles.recipes.gguf import convert
from miles.rollout.engines.sglang.config import SGLangConfig
from miles.rollout.engines.sglang.engine import SGLangEngine
from miles.trainer.settings import BackendConfig
from miles.trainer.trainer import Trainer, TrainerConfig
from miles.types import Generated, GenerateRequest

MODES: dict[str, dict[str, object]] = {
    "default": {},
    "deterministic": {"deterministic": True},
    "on-policy kernels": {"deterministic": True, "on_policy_target": "fsdp"},
}
COUNT, PROMPT, TOKENS = 32, 96, 96


def requests() -> list[GenerateRequest]:
    """The same ones in every mode."""
    dice = random.Random(0)
    prompts = [[dice.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(COUNT)]
    return [
        GenerateRequest(id=f"r{n}", session=f"s{n}", prompt_ids=prompt, max_tokens=TOKENS)
        for n, prompt in enumerate(prompts)
    ]


async def compare_modes(options: argparse.Namespace, out: Path) -> bool:
    """Print a table; whether every mode could be served."""
    model = await model_of(options, out)
    base = settings_of(options).model_copy(update={"memory": 0.15})
    engines = {
        name: SGLangEngine(model, out / name.replace(" ", "-"), settled(base, mode), dtype="bfloat16")
        for name, mode in MODES.items()
    }
    starts = await asyncio.gather(*(engine.start() for engine in engines.values()), return_exceptions=True)
    compute = BackendConfig(dtype="bfloat16")
    try:
        async with Trainer(model, out, TrainerConfig(compute=compute)) as trainer:
            for (name, engine), error in zip(engines.items(), starts, strict=True):
                if error is not None:
                    print(f"{name:20} FAILED: {str(error)[-1500:]}", flush=True)
                    continue
                await measure(name, engine, trainer)
                if name == "default":
                    await converse(engine)
    finally:
        await asyncio.gather(*(engine.close() for engine in engines.values()))
    return not any(starts)


async def model_of(options: argparse.Namespace, out: Path) -> Path:
    """The model directory that was named, or one made of the file that was."""
    if options.model.is_dir():
        return Path(options.model)
    model = out / "smollm2"
    if not model.is_dir():
        await asyncio.to_thread(convert, options.model, model)
    return model


def settings_of(options: argparse.Namespace) -> SGLangConfig:
    """The engine's settings on the command line."""
    words = [word.removeprefix("engine.") for word in options.settings if word.startswith("engine.sglang.")]
    base = build(EngineSection, apply_overrides(EngineSection, {}, words)).sglang
    changes: dict[str, object] = {"python": options.python, "start_s": 400.0}
    if options.path:
        changes["environment"] = {"PYTHONPATH": str(options.path)}
    return base.model_copy(update=changes)


def settled(base: SGLangConfig, mode: dict[str, object]) -> SGLangConfig:
    """The settings of one mode."""
    return SGLangConfig.model_validate(base.model_dump() | mode)


async def measure(name: str, engine: SGLangEngine, trainer: Trainer) -> None:
    """Together, then one by one: what the engine says of its own tokens, and what the trainer says."""
    asked = requests()
    together = await asyncio.gather(*map(engine.generate, asked))
    alone = [await engine.generate(replace(request, session=f"again-{request.session}")) for request in asked[:8]]
    same = [one.output_ids == other.output_ids for one, other in zip(alone, together, strict=False)]
    apart = [gap(one, other) for one, other, equal in zip(alone, together, same, strict=False) if equal]
    rows = []
    for n, (request, found) in enumerate(zip(asked, together, strict=True)):
        rows.append(row([*request.prompt_ids, *found.output_ids], PROMPT, n))
        rows[-1].logprobs[:] = [0.0 if value is None else value for value in found.logprobs]
    scores = await trainer.score(rows)
    off = np.abs(np.concatenate([s["logprobs"] for s in scores]) - np.concatenate([r.logprobs for r in rows]))
    print(
        f"{name:20} engine to trainer: mean {off.mean():.5f}, 99 % {np.quantile(off, 0.99):.4f}, max {off.max():.4f}, "
        f"equal to the last bit {np.mean(off == 0):.1%}; alone and in a batch of {COUNT}: same ids {sum(same)} of "
        f"{len(same)}, logprobs of these apart by at most {max(apart, default=float('nan')):.5f}",
        flush=True,
    )


async def converse(engine: SGLangEngine, *, sessions: int = 64, turns: int = 20) -> None:
    """Conversations as agents have them, and what the prefix cache saves: the same 1,500 tokens at the beginning of all
    (asked once before, as in a run that is under way), 500 of their own, and 100 more a turn."""
    dice = random.Random(1)
    shared = [dice.randrange(100, 40_000) for _ in range(1500)]
    for number in range(8):
        await engine.generate(GenerateRequest(id=f"w{number}", session=f"w{number}", prompt_ids=shared, max_tokens=1))
    engine.counters()
    began = time.monotonic()

    async def one(number: int) -> None:
        ids = [*shared, *(dice.randrange(100, 40_000) for _ in range(500))]
        for turn in range(turns):
            asked = GenerateRequest(id=f"c{number}-{turn}", session=f"c{number}", prompt_ids=ids, max_tokens=50)
            found = await engine.generate(asked)
            ids = [*ids, *found.output_ids, *(dice.randrange(100, 40_000) for _ in range(50))]

    await asyncio.gather(*map(one, range(sessions)))
    seconds = time.monotonic() - began
    counters = engine.counters()
    print(
        f"{sessions} conversations of {turns} turns: prefix hit {counters['engine/prefix_hit']:.2%}, "
        f"{sessions * turns / seconds:.1f} turns/s",
        flush=True,
    )


def gap(one: Generated, other: Generated) -> float:
    """Largest difference between the logprobs of the same tokens."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return max(abs((a or 0.0) - (b or 0.0)) for a, b in pairs)

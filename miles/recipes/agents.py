"""Who plays an episode: the generation layer that is named, else a harness, else what the environment says."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from miles.config import build
from miles.envs.base import Taskset
from miles.harnesses.base import Harness, as_harness
from miles.harnesses.program import program_class
from miles.registry import make_plugin, resolve
from miles.rollout.episode import AgentGenerate, Generate

__all__ = ["generate_for", "make_harness"]


def make_harness(name: str, settings: dict[str, Any]) -> Harness:
    """A harness by registry name, by module:attr, or by the path of its `harness.toml`."""
    if not name.endswith(".toml"):
        return as_harness(make_plugin("harnesses", name, settings))
    described = program_class(Path(name))
    return described(build(described.config_class, settings))


async def generate_for(
    taskset: Taskset, generation: str | None, harness: str, settings: dict[str, Any], stack: contextlib.AsyncExitStack
) -> Generate:
    """Empty names are the environment's choice. What has a `close()` is closed with the stack."""
    named = generation or ("" if harness else taskset.generation)
    if named:
        generate: Generate = resolve("harnesses", named)
        if (close := getattr(generate, "close", None)) is not None:
            stack.push_async_callback(close)
        return generate
    made = make_harness(harness or taskset.harness, settings)
    stack.push_async_callback(made.close)
    if (prepare := getattr(made, "prepare", None)) is not None:
        await asyncio.to_thread(prepare)
    return AgentGenerate(made)

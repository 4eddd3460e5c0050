"""Who plays an episode: the generation layer that is named, else a harness, else what the environment says."""

import contextlib
from typing import Any

from miles.envs.base import Taskset
from miles.harnesses.base import as_harness
from miles.registry import make_plugin, resolve
from miles.rollout.episode import AgentGenerate, Generate

__all__ = ["generate_for"]


def generate_for(
    taskset: Taskset, generation: str | None, harness: str, settings: dict[str, Any], stack: contextlib.AsyncExitStack
) -> Generate:
    """Empty names are the environment's choice. A harness is closed with the stack."""
    named = generation or ("" if harness else taskset.generation)
    if named:
        generate: Generate = resolve("harnesses", named)
        return generate
    made = as_harness(make_plugin("harnesses", harness or taskset.harness, settings))
    stack.push_async_callback(made.close)
    return AgentGenerate(made)

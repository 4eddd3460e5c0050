"""Canonicalisers: declared changes to what a client sent, made before anything is tokenised.

A harness that puts a clock or a billing line into its prompt makes every episode's prefix different; one
that returns parallel results in the order they finished makes equal runs unequal. A canonicaliser removes
such noise in the open: the policy sees exactly what is recorded, and each turn says which ones changed it.
"""

import re
from collections.abc import Callable, Sequence

from miles.rollout.rendering.text import text_of
from miles.rollout.session.matching import calls_of
from miles.types import Message

__all__ = ["Canonicaliser", "freeze_clock", "sort_tool_results", "strip_billing"]

Canonicaliser = Callable[[Sequence[Message]], list[Message]]

_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE)
_CLOCK = re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?")


def strip_billing(messages: Sequence[Message]) -> list[Message]:
    """Without the billing line that Claude Code puts before its system prompt."""
    return _system(messages, lambda text: _BILLING.sub("", text))


def freeze_clock(messages: Sequence[Message]) -> list[Message]:
    """Dates with a time of day in system prompts become the start of the year 2000."""
    return _system(messages, lambda text: _CLOCK.sub("2000-01-01T00:00:00", text))


def sort_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Results of parallel calls in the order of the calls."""
    ordered: list[Message] = []
    rank: dict[str, int] = {}
    run: list[Message] = []
    for message in [*messages, {"role": ""}]:
        if message.get("role") == "tool":
            run.append(message)
            continue
        ordered += sorted(run, key=lambda m: rank.get(str(m.get("tool_call_id")), len(rank)))
        run = []
        if message.get("role") == "assistant":
            rank = {call: place for place, (call, _, _) in enumerate(calls_of(message))}
        ordered.append(message)
    return ordered[:-1]


def _system(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message]:
    changed = []
    for message in messages:
        if message.get("role") == "system":
            before = text_of(message.get("content"))
            after = change(before)
            if after != before:
                message = {**message, "content": after}
        changed.append(message)
    return changed

"""How a turn came to be: what clients say of themselves, and what their requests look like.

Clients that label their calls (Claude Code, Codex, OpenCode) are believed. For the others a table of
fingerprints knows the side calls and compactions of common harnesses; a sub-agent is known by its first
words, which are an argument of the call that started it; a fresh start by the summary it quotes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.rollout.rendering.text import text_of
from miles.rollout.session.matching import calls_of
from miles.types import Edge, Message, ToolSpec

__all__ = ["Hints", "Origins", "read_hints", "task_of"]

_MIN_QUOTE = 8

_SIDE_SYSTEMS = ("You are a title generator",)
_SIDE_BEGINNINGS = ("Managed memory has TWO directories",)
_COMPACTION_SYSTEMS = ("context summarization agent", "<state_snapshot>")
_COMPACTION_BEGINNINGS = (
    "CRITICAL: Respond with TEXT ONLY",
    "CONTEXT CHECKPOINT COMPACTION",
    "You are performing a CONTEXT CHECKPOINT COMPACTION",
    "You are about to run out of context",
    "You are about to hand off your work to another AI agent",
    "You are picking up work from a previous AI agent on this task",
    "The next agent has a few questions for you",
    "You are maintaining a context-aware state summary",
    "First, reason in your scratchpad. Then, generate the <state_snapshot>",
)
_SUBAGENT_SYSTEMS = ("cc_is_subagent=true", "general-purpose subagent working for a parent agent")

_WIRE_HEADERS = {
    "x-claude-code-agent-id": "agent",
    "x-claude-code-session-id": "session",
    "x-openai-subagent": "subagent",
    "x-codex-parent-thread-id": "parent_thread",
    "thread-id": "thread",
    "session-id": "session",
    "x-codex-window-id": "window",
    "x-session-id": "session",
    "x-parent-session-id": "parent_session",
}
_CODEX_TURN = ("request_kind", "window_number", "context_window_id", "parent_thread_id", "subagent_kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What a request says of itself: an edge, if any, and the client's own names for where it belongs.

    `sure` says that the client named the edge; otherwise it was guessed from texts.
    """

    edge: Edge | None = None
    sure: bool = False
    wire: dict[str, str] = field(default_factory=dict)


def read_hints(
    headers: Mapping[str, str],
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    body: Mapping[str, Any] | None = None,
) -> Hints:
    """Headers first, then fingerprints. Header names are lower case."""
    wire = {name: headers[header] for header, name in _WIRE_HEADERS.items() if headers.get(header)}
    wire |= _codex_turn(headers.get("x-codex-turn-metadata", ""))
    cache_key = (body or {}).get("prompt_cache_key")
    if isinstance(cache_key, str):
        wire.setdefault("session", cache_key)
    if wire.get("request_kind") == "compaction":
        return Hints(edge=Edge.COMPACTION_REQUEST, sure=True, wire=wire)
    guess = _guess(messages, tools)
    if guess is None and any(wire.get(name) for name in _OF_A_CHILD):
        return Hints(edge=Edge.SUBAGENT, sure=True, wire=wire)
    return Hints(edge=guess, wire=wire)


_OF_A_CHILD = ("agent", "subagent", "parent_thread", "parent_thread_id", "parent_session")


def _guess(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Edge | None:
    system = _text_of_first(messages, "system")
    last = _beginnings(messages)
    if any(mark in system for mark in _SIDE_SYSTEMS) or any(text.startswith(_SIDE_BEGINNINGS) for text in last):
        return Edge.SIDE
    asked_to_sum_up = any(text.startswith(_COMPACTION_BEGINNINGS) for text in last)
    if asked_to_sum_up or (not tools and any(mark in system for mark in _COMPACTION_SYSTEMS)):
        return Edge.COMPACTION_REQUEST
    return Edge.SUBAGENT if any(mark in system for mark in _SUBAGENT_SYSTEMS) else None


def _codex_turn(text: str) -> dict[str, str]:
    try:
        told = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return {name: str(told[name]) for name in _CODEX_TURN if isinstance(told, dict) and told.get(name) is not None}


def _beginnings(messages: Sequence[Message]) -> list[str]:
    """The last message, if it is the user's, and each of its parts: where an instruction to sum up begins.

    Not further back and not in the middle: tools print such words, too, and some agents send output as a user.
    """
    last = messages[-1] if messages else {}
    return [text.lstrip() for text in _whole_and_parts(last)] if last.get("role") == "user" else []


def _whole_and_parts(message: Message) -> list[str]:
    content = message.get("content")
    parts = [text_of([part]) for part in content] if isinstance(content, list) else []
    return [text_of(content), *parts]


def _text_of_first(messages: Sequence[Message], role: str) -> str:
    return next((text_of(m.get("content")) for m in messages[:2] if m.get("role") == role), "")


def task_of(messages: Sequence[Message]) -> list[str]:
    """Texts that may be the task a conversation was started with: the first user messages and their parts."""
    texts = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        if message.get("role") == "user":
            texts += [text.strip() for text in _whole_and_parts(message)]
    return texts


class Origins:
    """Finds the turn that a new root belongs to: by a quoted call argument, or by a quoted summary."""

    def __init__(self) -> None:
        self._by_argument: dict[str, int] = {}
        self._summaries: list[tuple[str, int]] = []

    def add(self, turn: int, message: Message, edge: Edge) -> None:
        """Remember what a committed turn may be quoted by later."""
        for _, _, arguments in calls_of(message):
            for value in _strings(arguments):
                self._by_argument[value.strip()] = turn
        if edge is Edge.COMPACTION_REQUEST:
            summary = _summary(text_of(message.get("content")))
            if len(summary) >= _MIN_QUOTE:
                self._summaries.append((summary, turn))

    def spawner(self, tasks: Sequence[str]) -> int | None:
        """The newest turn whose call has an argument that a conversation was started with."""
        found = [self._by_argument[text] for text in tasks if text in self._by_argument]
        return max(found, default=None)

    def compacted(self, messages: Sequence[Message]) -> int | None:
        """The newest summary that this conversation quotes."""
        if not self._summaries:
            return None
        texts = [text_of(message.get("content")) for message in messages if message.get("role") != "system"]
        for summary, turn in reversed(self._summaries):
            if any(summary in text for text in texts):
                return turn
        return None


def _summary(text: str) -> str:
    inner = re.search(r"<(summary|state_snapshot)>(.*?)</\1>", text, re.DOTALL)
    return (inner.group(2) if inner else text).strip()


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if len(value) >= _MIN_QUOTE else []
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return []

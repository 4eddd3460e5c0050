"""Which recorded turn does a request continue? Messages are compared in a normal form, by hash chains.

What clients change without meaning it is dropped: cache marks, item ids, null against "" against
missing, text against a list of text parts, the spelling of a call's JSON. Reasoning is left out of
the comparison, since many clients do not send it back; a matched turn keeps its own tokens anyway.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles.rollout.rendering.text import text_of
from miles.types import Message, ToolSpec

__all__ = ["Lines", "calls_of", "chain", "root_key"]

_REMEMBERED_LINES = 4


def root_key(tools: Sequence[ToolSpec], model: str = "policy", agent: str = "") -> bytes:
    """Key of an empty conversation: other tools, another model or another agent, other tree."""
    return _digest(b"", {"tools": list(tools), "model": model, "agent": agent})


def chain(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Keys after each message: equal keys mean equal conversations up to there."""
    keys, key = [], start
    for message in messages:
        key = _digest(key, _normal(message))
        keys.append(key)
    return keys


@dataclass(frozen=True, slots=True)
class _Line:
    start: bytes
    messages: list[Message]
    keys: list[bytes]


class Lines:
    """The chains of the last few requests, so that a request costs its new messages and not its history.

    A message equal to the one in its place last time keeps its key; comparing costs a fraction of hashing.
    The older objects are kept, so a long history is held in memory once.
    """

    def __init__(self) -> None:
        self._lines: list[_Line] = []

    def chain(self, start: bytes, messages: Sequence[Message]) -> tuple[list[bytes], list[Message]]:
        """(Keys as of `chain`, the messages with known objects in place of equal new ones)."""
        line, known = self._closest(start, messages)
        keys, kept, in_step = [], list(messages), line is not None
        key = start
        for place, message in enumerate(messages):
            before = line.messages[place] if line is not None and place < len(line.messages) else None
            if (
                line is not None
                and before is not None
                and in_step
                and (place < known or (before == message and _exactly(message)))
            ):
                key, kept[place] = line.keys[place], before
            else:
                key = _digest(key, _normal(message))
                in_step = line is not None and before is not None and key == line.keys[place]
            keys.append(key)
        if line is not None and len(messages) >= len(line.messages):
            self._lines.remove(line)
        self._lines = [_Line(start, kept, keys), *self._lines[: _REMEMBERED_LINES - 1]]
        return keys, kept

    def _closest(self, start: bytes, messages: Sequence[Message]) -> tuple[_Line | None, int]:
        best, length = None, 0
        for line in self._lines:
            if line.start != start:
                continue
            same = 0
            for old, new in zip(line.messages, messages, strict=False):
                if old != new or not _exactly(new):
                    break
                same += 1
            if same > length:
                best, length = line, same
        return best, length


def _exactly(message: Message) -> bool:
    """Whether equality says it all: Python takes 1, 1.0 and True for one, as arguments they are not."""
    return all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("arguments"), str)
        for call in message.get("tool_calls") or ()
    )


def calls_of(message: Message) -> list[tuple[str, str, Any]]:
    """(id, name, arguments) of each tool call; arguments as JSON values where they are JSON, else the raw text."""
    return [_call(call) for call in message.get("tool_calls") or ()]


def _normal(message: Message) -> dict[str, Any]:
    normal: dict[str, Any] = {"role": message.get("role"), "text": text_of(message.get("content"))}
    if message.get("tool_call_id"):
        normal["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        normal["calls"] = calls_of(message)
    return normal


def _call(call: Any) -> tuple[str, str, Any]:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return str(call.get("id") or ""), str(function.get("name") or ""), {} if arguments is None else _as_js(arguments)


def _as_js(value: Any) -> Any:
    """Numbers as JavaScript writes them back: 10.0 as 10, integers beyond 2^53 rounded."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 53:
        return int(float(value)) if abs(value) < 1 << 1000 else value
    if isinstance(value, dict):
        return {name: _as_js(item) for name, item in value.items()}
    return [_as_js(item) for item in value] if isinstance(value, list) else value


def _digest(previous: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(previous + text.encode("utf-8", "replace"), digest_size=16).digest()

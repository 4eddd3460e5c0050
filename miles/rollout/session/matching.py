"""Which recorded turn does a request continue? Messages are compared in a normal form, by hash chains.

What clients change without meaning it is dropped: cache marks, item ids, null against "" against
missing, text against a list of text parts, the spelling of a call's JSON. Reasoning is left out of
the comparison, since many clients do not send it back; a matched turn keeps its own tokens anyway.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from miles.errors import SessionError
from miles.types import Message, ToolSpec

__all__ = ["chain", "root_key", "text_of"]


def root_key(tools: Sequence[ToolSpec]) -> bytes:
    """Key of an empty conversation: other tools, other tree."""
    return _digest(b"", {"tools": list(tools)})


def chain(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Keys after each message: equal keys mean equal conversations up to there."""
    keys, key = [], start
    for message in messages:
        key = _digest(key, _normal(message))
        keys.append(key)
    return keys


def text_of(content: Any) -> str:
    """Text of a content that is a string, null, or a list of text parts.

    Raises SessionError for parts that this model cannot read.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    raise SessionError(f"message content must be text or a list of parts, not {type(content).__name__}")


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise SessionError(f"content part {kind!r} is not supported: this session reads text only")


def _normal(message: Message) -> dict[str, Any]:
    normal: dict[str, Any] = {"role": message.get("role"), "text": text_of(message.get("content"))}
    if message.get("tool_call_id"):
        normal["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        normal["calls"] = [_call(call) for call in message["tool_calls"]]
    return normal


def _call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(json.JSONDecodeError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return [call.get("id"), function.get("name"), arguments or {}]


def _digest(previous: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(previous + text.encode("utf-8", "replace"), digest_size=16).digest()

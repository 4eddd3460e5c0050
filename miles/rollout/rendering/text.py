"""Texts: a message's content, however a client writes it; the settled part of one that still grows."""

from typing import Any

from miles.errors import SessionError

__all__ = ["settled", "text_of"]

_HELD_BACK = 32


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
    if isinstance(part, dict) and part.get("type") == "refusal":
        return str(part.get("refusal", ""))
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise SessionError(f"content part {kind!r} is not supported: this session reads text only")


def settled(text: str, stops: tuple[str, ...] = ()) -> str:
    """The part of a growing text that no later token can change: no half marks, letters or stop strings."""
    for stop in stops:
        text = text.partition(stop)[0]
    text = text.rstrip("\ufffd")
    longest = max((len(stop) for stop in stops), default=1) - 1
    if longest:
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in stops):
                text = text[:-size]
                break
    mark = text.rfind("<")
    if mark >= max(0, len(text) - _HELD_BACK):
        text = text[:mark]
    return text.rstrip()

"""The text of a message's content, however a client writes it."""

from typing import Any

from miles.errors import SessionError

__all__ = ["text_of"]


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

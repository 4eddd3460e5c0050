"""Responses items and tools as messages and tools of ours."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles.errors import SessionError
from miles.rollout.rendering.text import text_of
from miles.rollout.session.dialects.base import Wishes
from miles.types import Message, ToolSpec

__all__ = ["Kinds", "messages_of", "tools_of"]

_CUSTOM, _NAMESPACE = "x-custom", "x-namespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Tools that are no plain functions: free-form ones, and those that belong to a namespace."""

    custom: frozenset[str]
    namespaces: dict[str, str]

    @classmethod
    def of(cls, tools: Sequence[ToolSpec]) -> "Kinds":
        custom = frozenset(t["function"]["name"] for t in tools if t.get(_CUSTOM))
        spaces = {t["function"]["name"]: t[_NAMESPACE] for t in tools if t.get(_NAMESPACE)}
        return cls(custom=custom, namespaces=spaces)


def tools_of(tools: Any, wishes: Wishes) -> tuple[ToolSpec, ...]:
    """Functions as they are, free-form tools as functions of one text, namespaces flattened, the rest noted."""
    if not isinstance(tools or [], list):
        raise SessionError("tools must be a list")
    made: list[ToolSpec] = []
    dropped: list[str] = []
    for tool in tools or []:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            made.append(_function(tool))
        elif kind == "custom":
            made.append(_free_form(tool))
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            inner = [t for t in tool["tools"] if isinstance(t, dict) and t.get("type", "function") == "function"]
            made += [{**_function(t), _NAMESPACE: str(tool.get("name") or "")} for t in inner]
        elif isinstance(kind, str):
            dropped.append(kind)  # run by the provider's own servers; there are none here
        else:
            raise SessionError("tools must be a list of objects with a type")
    if dropped:
        wishes.asked["tools_dropped"] = dropped
    return tuple(made)


def _function(tool: dict[str, Any]) -> ToolSpec:
    if not isinstance(tool.get("name"), str):
        raise SessionError("each function tool needs a name")
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _free_form(tool: dict[str, Any]) -> ToolSpec:
    shape = tool.get("format")
    grammar = shape.get("definition") if isinstance(shape, dict) else None
    description = str(tool.get("description") or "")
    if grammar:
        description += f"\nThe input must follow this grammar:\n{grammar}"
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    made = _function({"name": tool.get("name"), "description": description, "parameters": text})
    return {**made, _CUSTOM: True}


def messages_of(instructions: Any, items: Any) -> list[Message]:
    """Messages of a request; what an assistant did in a row becomes one message."""
    messages: list[Message] = []
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions, "instructions": True})
    elif instructions is not None and not isinstance(instructions, str):
        raise SessionError("instructions must be text")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise SessionError("input must be text or a non-empty list of items")
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise SessionError(f"{where} must be an object")
        piece = _piece(item, where)
        if piece is None:
            continue
        last = messages[-1] if messages else None
        if piece["role"] == "assistant" and last is not None and last["role"] == "assistant" and _goes_on(last, piece):
            _join(last, piece)
        else:
            messages.append(piece)
    return messages


def _piece(item: dict[str, Any], where: str) -> Message | None:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
        if role not in ("user", "assistant", "system"):
            raise SessionError(f"{where}.role must be user, assistant, system or developer")
        message: Message = {"role": role, "content": text_of(item.get("content"))}
        return _named(message, item) if role == "assistant" else message
    if kind == "reasoning":
        summary = item.get("summary")
        parts = summary if isinstance(summary, list) else []
        thought = "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
        message = {"role": "assistant", "content": "", **({"reasoning_content": thought} if thought else {})}
        return _named(message, item)
    if kind in ("function_call", "custom_tool_call"):
        if not isinstance(item.get("name"), str):
            raise SessionError(f"{where} needs a name")
        given = item.get("arguments", "") if kind == "function_call" else json.dumps({"input": item.get("input", "")})
        function = {"name": item["name"], "arguments": given}
        call = {"id": str(item.get("call_id") or ""), "type": "function", "function": function}
        return _named({"role": "assistant", "content": "", "tool_calls": [call]}, item)
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        text = output if isinstance(output, str) else text_of(output)
        return {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": text}
    if kind == "item_reference":
        raise SessionError(f"{where}: items cannot be referred to by id; send them whole, or use previous_response_id")
    if isinstance(kind, str):
        return None  # a call of a provider's own tool: never ours
    raise SessionError(f"{where} needs a type")


def _named(message: Message, item: dict[str, Any]) -> Message:
    """With the turn's name, from what of ours the client sent back."""
    for token in (item.get("encrypted_content"), _token(item)):
        if isinstance(token, str) and _OURS.fullmatch(token):
            return {**message, "turn_token": token}
    return message


_OURS = re.compile(r"[0-9a-f]{24}")  # clients make up ids of their own; they name nothing


def _token(item: dict[str, Any]) -> str:
    name = str(item.get("id") or "")
    for prefix in ("rs_", "msg_"):
        if name.startswith(prefix):
            return name[len(prefix) :]
    parts = name.split("_", 2)
    return parts[2] if len(parts) == 3 and parts[0] == "fc" else ""


def _goes_on(last: Message, piece: Message) -> bool:
    """Whether a piece belongs to the same turn: by the names of both, where both have one."""
    names = {last.get("turn_token"), piece.get("turn_token")} - {None, ""}
    return len(names) < 2


def _join(last: Message, piece: Message) -> None:
    last["content"] = last["content"] + piece["content"]
    if piece.get("reasoning_content"):
        last["reasoning_content"] = last.get("reasoning_content", "") + piece["reasoning_content"]
    if piece.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *piece["tool_calls"]]
    if piece.get("turn_token"):
        last["turn_token"] = piece["turn_token"]

"""The Anthropic Messages dialect."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from miles.errors import MilesError, SessionError
from miles.rollout.rendering.text import settled
from miles.rollout.session.dialects.base import (
    Wishes,
    check_messages,
    event,
    positive,
    status_of,
    stops_of,
    truncated,
    unsent,
)
from miles.rollout.session.edges import read_hints
from miles.rollout.session.session import ChatRequest, Completion
from miles.types import Message, ToolSpec

__all__ = ["MessagesDialect", "MessagesStream"]

_RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "thinking",
    "metadata",
    "service_tier",
    "context_management",
    "output_config",
)
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesDialect:
    """`POST /v1/messages` and `/v1/messages/count_tokens`."""

    def parse(self, body: dict[str, Any], headers: Mapping[str, str], wishes: Wishes) -> ChatRequest:
        """Check a request body; SessionError names the field that is wrong."""
        said = check_messages(body.get("messages"), "messages")
        messages: list[Message] = []
        if body.get("system"):
            messages.append({"role": "system", "content": _texts(body["system"], "system")})
        for index, message in enumerate(said):
            messages += _messages(message, f"messages[{index}]")
        if not any(m["role"] != "system" for m in messages):
            raise SessionError("messages must hold at least one user message")
        wishes.record(body, *_RECORDED)
        choice = body.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if kind not in (None, "auto", "none"):
            wishes.forced("tool_choice", choice)
        wanted = body.get("output_config")
        shape = body.get("output_format") or (wanted.get("format") if isinstance(wanted, dict) else wanted)
        if shape:
            wishes.forced("output_config.format", shape)
        tools = _tools(body.get("tools"), wishes)
        return ChatRequest(
            messages=tuple(messages),
            tools=tools,
            max_tokens=positive(body.get("max_tokens"), "max_tokens"),
            stop=stops_of(body.get("stop_sequences"), "stop_sequences"),
            may_call=kind != "none",
            model=str(body.get("model") or "policy"),
            call_prefix="toolu_",
            hints=read_hints(headers, messages, tools, body),
            asked=wishes.asked,
        )

    def reply(self, done: Completion, request: ChatRequest, *, told_of_cut: bool) -> dict[str, Any]:
        """The whole reply as one JSON object."""
        return {
            "id": f"msg_{done.token}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": _blocks(done),
            "stop_reason": _stop_reason(done, told_of_cut),
            "stop_sequence": done.stop,
            "usage": _usage(done),
        }

    def stream(
        self, request: ChatRequest, body: dict[str, Any], headers: Mapping[str, str], *, told_of_cut: bool
    ) -> "MessagesStream":
        return MessagesStream(request, told_of_cut=told_of_cut)

    def error_reply(self, error: MilesError) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, body, headers) in Anthropic's envelope."""
        status, _, headers = status_of(error)
        kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return status, {"type": "error", "error": {"type": kind, "message": str(error)}}, headers


class MessagesStream:
    """message_start, then per block start, deltas and stop, then message_delta and message_stop."""

    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, request: ChatRequest, *, told_of_cut: bool) -> None:
        self._model, self._stop, self._told_of_cut = request.model, request.stop, told_of_cut
        self._token = ""
        self._index = 0
        self._open: str | None = None
        self._sent = {"thinking": "", "text": ""}

    def start(self, token: str, prompt_tokens: int) -> Iterator[bytes]:
        self._token = token
        message: dict[str, Any] = {
            "id": f"msg_{token}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 1},
        }
        yield self._event("message_start", message=message)
        yield self.keepalive

    def progress(self, content: str, reasoning: str) -> Iterator[bytes]:
        """Events for text known so far."""
        yield from self._text("thinking", settled(reasoning))
        yield from self._text("text", settled(content, self._stop))

    def finish(self, done: Completion) -> Iterator[bytes]:
        """The rest of the blocks, the reason, the end."""
        yield from self._text("thinking", done.parsed.reasoning)
        yield from self._text("text", done.parsed.content)
        yield from self._close()
        for call in done.message.get("tool_calls", ()):
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            yield self._event("content_block_start", index=self._index, content_block=block)
            delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"] or "{}"}
            yield self._event("content_block_delta", index=self._index, delta=delta)
            yield self._event("content_block_stop", index=self._index)
            self._index += 1
        ending = {"stop_reason": _stop_reason(done, self._told_of_cut), "stop_sequence": done.stop}
        yield self._event("message_delta", delta=ending, usage=_usage(done))
        yield self._event("message_stop")

    def error(self, error: MilesError) -> bytes:
        """A failure after the headers went out."""
        return event(MessagesDialect().error_reply(error)[1], "error")

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        if kind == "thinking" and self._sent["text"]:
            return  # its block is closed
        new = unsent(self._sent, kind, text)
        if not new:
            return
        if self._open != kind:
            yield from self._close()
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            yield self._event("content_block_start", index=self._index, content_block=block)
            self._open = kind
        delta = {"type": f"{kind}_delta", kind: new}
        yield self._event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            signature = {"type": "signature_delta", "signature": self._token}
            yield self._event("content_block_delta", index=self._index, delta=signature)
        yield self._event("content_block_stop", index=self._index)
        self._open = None
        self._index += 1

    def _event(self, name: str, **data: Any) -> bytes:
        return event({"type": name, **data}, name)


def _blocks(done: Completion) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if done.parsed.reasoning:
        blocks.append({"type": "thinking", "thinking": done.parsed.reasoning, "signature": done.token})
    if done.parsed.content:
        blocks.append({"type": "text", "text": done.parsed.content})
    for call in done.message.get("tool_calls", ()):
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function)})
    return blocks


def _input(function: Mapping[str, Any]) -> Any:
    """Arguments as an object; broken ones as Claude Code itself reports them."""
    raw = function["arguments"]
    try:
        value = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}


def _stop_reason(done: Completion, told_of_cut: bool) -> str:
    if truncated(done, told_of_cut):
        return "max_tokens"
    if done.parsed.calls:
        return "tool_use"
    return "stop_sequence" if done.stop is not None else "end_turn"


def _usage(done: Completion) -> dict[str, int]:
    return {
        "input_tokens": done.prompt_tokens - done.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached_tokens,
        "output_tokens": done.completion_tokens,
    }


def _messages(message: Any, where: str) -> list[Message]:
    """One Anthropic message as messages of ours: results first become tool messages, in the order sent."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise SessionError(f"{where}.role must be user, assistant or system")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise SessionError(f"{where}.content must be text or a list of blocks")
    if message["role"] == "assistant":
        return [_assistant(content, where)]
    made: list[Message] = []
    texts: list[dict[str, Any]] = []
    for block in content:
        if block.get("type") == "tool_result":
            if texts:
                made.append({"role": message["role"], "content": _parts(texts, where)})
                texts = []
            text = _texts(block.get("content") or "", where)
            made.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text})
        else:
            texts.append(block)
    if texts or not made:
        made.append({"role": message["role"], "content": _parts(texts, where)})
    return made


def _parts(blocks: list[dict[str, Any]], where: str) -> Any:
    """One text, or several as the paragraphs of their own that they are."""
    if len(blocks) < 2:
        return _texts(blocks, where)
    texts = [_text(block, where) for block in blocks]
    return [{"type": "text", "text": text} for text in (*(text + "\n" for text in texts[:-1]), texts[-1])]


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    message: Message = {"role": "assistant"}
    texts, calls, thoughts = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
            message["turn_token"] = str(block.get("signature") or "")
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind != "redacted_thinking":
            texts.append(block)
    message["content"] = "".join(_text(block, where) for block in texts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    given = {} if given is None else given
    unparsed = given.get("__unparsedToolInput") if isinstance(given, dict) else None
    raw = unparsed.get("raw") if isinstance(unparsed, dict) else None
    if not isinstance(given, dict) or not isinstance(block.get("name"), str):
        raise SessionError(f"{where}: tool_use needs a name and an input object")
    arguments = raw if isinstance(raw, str) else json.dumps(given)
    return {
        "id": str(block.get("id") or ""),
        "type": "function",
        "function": {"name": block["name"], "arguments": arguments},
    }


def _texts(content: Any, where: str) -> str:
    """Text of a string or of text blocks, which are paragraphs of their own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise SessionError(f"{where} must be text or a list of text blocks")
    return "\n".join(_text(block, where) for block in content)


def _text(block: Any, where: str) -> str:
    if isinstance(block, dict) and isinstance(block.get("text"), str):
        return str(block["text"])
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    raise SessionError(f"{where}: content block {kind!r} is not supported: this session reads text only")


def _tools(tools: Any, wishes: Wishes) -> tuple[ToolSpec, ...]:
    if not isinstance(tools or [], list):
        raise SessionError("tools must be a list")
    made, dropped = [], []
    for tool in tools or []:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise SessionError("tools must be a list of {name, description, input_schema}")
        if "input_schema" not in tool:
            dropped.append(tool["name"])  # run by the provider's own servers; there are none here
            continue
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        made.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    if dropped:
        wishes.asked["tools_dropped"] = dropped
    return tuple(made)

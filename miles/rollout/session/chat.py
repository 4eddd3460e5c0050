"""The OpenAI chat-completions dialect: a body becomes a ChatRequest, a Completion becomes a reply or events."""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from miles.errors import ContextOverflow, EngineError, MilesError, SessionError
from miles.rollout.session.matching import text_of
from miles.rollout.session.session import ChatRequest, Completion
from miles.types import Finish

__all__ = ["ChatStream", "error_reply", "parse", "reply"]

_ROLES = {"system", "developer", "user", "assistant", "tool"}
_RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
)


def parse(body: Any) -> ChatRequest:
    """Check a request body; SessionError names the field that is wrong."""
    if not isinstance(body, dict):
        raise SessionError("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise SessionError("messages must be a non-empty list")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise SessionError(f"messages[{index}].role must be one of {', '.join(sorted(_ROLES))}")
        text_of(message.get("content"))
    if body.get("n") not in (None, 1):
        raise SessionError("n must be 1: send the request again for a sibling", code="unsupported_n")
    for name, fine in (
        ("tool_choice", ("auto", "none")),
        ("stop", ([], "")),
        ("response_format", ({"type": "text"},)),
    ):
        if body.get(name) is not None and body[name] not in fine:
            raise SessionError(f"{name}={json.dumps(body[name])[:80]} cannot be honoured exactly; leave it out")
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise SessionError("max_tokens must be a positive integer")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("function", {}).get("name") for t in tools):
        raise SessionError("tools must be a list of {type: function, function: {name, ...}}")
    return ChatRequest(
        messages=tuple({**m, "role": "system"} if m["role"] == "developer" else m for m in messages),
        tools=tuple(tools),
        max_tokens=max_tokens,
        model=str(body.get("model") or "policy"),
        asked={name: body[name] for name in _RECORDED if body.get(name) is not None},
    )


def reply(done: Completion, model: str) -> dict[str, Any]:
    """The whole reply as one JSON object."""
    message: dict[str, Any] = {**done.message, "content": done.message["content"] or None}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": _finish(done), "logprobs": None}],
        "usage": _usage(done),
    }


class ChatStream:
    """Makes `chat.completion.chunk` events; text that may still change is held back."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._sent = {"content": "", "reasoning_content": ""}

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def progress(self, content: str, reasoning: str) -> Iterator[bytes]:
        """Events for text known so far."""
        for name, text in (("reasoning_content", reasoning), ("content", content)):
            yield from self._text(name, text.rstrip("\ufffd").rstrip())

    def finish(self, done: Completion) -> Iterator[bytes]:
        """The rest of the text, the calls, the finish reason, usage, [DONE]."""
        yield from self._text("reasoning_content", done.parsed.reasoning)
        yield from self._text("content", done.parsed.content)
        for index, call in enumerate(done.message.get("tool_calls", ())):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk({}, _finish(done))
        if self._include_usage:
            yield _event({**self._head, "choices": [], "usage": _usage(done)})
        yield b"data: [DONE]\n\n"

    def error(self, error: MilesError) -> bytes:
        """A failure after the headers went out."""
        return _event(error_reply(error)[1])

    def _text(self, name: str, text: str) -> Iterator[bytes]:
        if text.startswith(self._sent[name]) and len(text) > len(self._sent[name]):
            delta, self._sent[name] = text[len(self._sent[name]) :], text
            yield self._chunk({name: delta})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        return _event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def error_reply(error: MilesError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) in OpenAI's envelope; only what may work again is called retryable."""
    status, code, headers = 500, "internal_error", {}
    if isinstance(error, SessionError):
        status, code = error.status, error.code
    elif isinstance(error, ContextOverflow):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, EngineError):
        status, code = (503, "engine_lost") if error.retryable else (502, "engine_error")
    if status in (429, 503):
        headers["Retry-After"] = "1"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": None, "code": code}}, headers


def _finish(done: Completion) -> str:
    if done.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if done.parsed.calls else "stop"


def _usage(done: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"

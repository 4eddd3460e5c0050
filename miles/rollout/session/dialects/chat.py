"""The OpenAI chat-completions dialect."""

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from miles.errors import MilesError, SessionError
from miles.rollout.rendering.text import settled, text_of
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

__all__ = ["ChatDialect", "ChatStream"]

_ROLES = {"system", "developer", "user", "assistant", "tool"}
_PLAIN = {"system", "user", "tool"}
_RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "reasoning_effort",
    "return_token_ids",
)


class ChatDialect:
    """`POST /v1/chat/completions`."""

    def parse(self, body: dict[str, Any], headers: Mapping[str, str], wishes: Wishes) -> ChatRequest:
        """Check a request body; SessionError names the field that is wrong."""
        messages = [_message(m, i) for i, m in enumerate(check_messages(body.get("messages"), "messages"))]
        if body.get("n") not in (None, 1):
            raise SessionError("n must be 1: send the request again for a sibling", code="unsupported_n")
        wishes.record(body, *_RECORDED)
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            wishes.forced("tool_choice", choice)
        if body.get("response_format") not in (None, {"type": "text"}):
            wishes.forced("response_format", body["response_format"])
        tools = _tools(body.get("tools"))
        return ChatRequest(
            messages=tuple(messages),
            tools=tools,
            max_tokens=positive(body.get("max_completion_tokens") or body.get("max_tokens"), "max_tokens"),
            stop=stops_of(body.get("stop"), "stop"),
            may_call=choice != "none",
            model=str(body.get("model") or "policy"),
            hints=read_hints(headers, messages, tools, body),
            asked=wishes.asked,
        )

    def reply(self, done: Completion, request: ChatRequest, *, told_of_cut: bool) -> dict[str, Any]:
        """The whole reply as one JSON object."""
        message: dict[str, Any] = {**done.message, "content": done.message["content"] or None}
        choice = {"index": 0, "message": message, "finish_reason": _finish(done, told_of_cut), "logprobs": None}
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [choice],
            "usage": _usage(done),
        }

    def stream(
        self, request: ChatRequest, body: dict[str, Any], headers: Mapping[str, str], *, told_of_cut: bool
    ) -> "ChatStream":
        options = body.get("stream_options")
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        python = headers.get("x-stainless-lang") == "python"
        return ChatStream(request, include_usage=usage, told_of_cut=told_of_cut, says_errors=python)

    def error_reply(self, error: MilesError) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, body, headers) in OpenAI's envelope."""
        status, code, headers = status_of(error)
        kind = "invalid_request_error" if status < 500 else "server_error"
        return status, {"error": {"message": str(error), "type": kind, "param": None, "code": code}}, headers


class ChatStream:
    """Makes `chat.completion.chunk` events; text that may still change is held back."""

    keepalive = b": keepalive\n\n"

    def __init__(
        self, request: ChatRequest, *, include_usage: bool, told_of_cut: bool, says_errors: bool = True
    ) -> None:
        self._says_errors = says_errors
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        self._stop, self._include_usage, self._told_of_cut = request.stop, include_usage, told_of_cut
        self._sent = {"content": "", "reasoning_content": ""}

    def start(self, token: str, prompt_tokens: int) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def progress(self, content: str, reasoning: str) -> Iterator[bytes]:
        """Events for text known so far."""
        yield from self._text("reasoning_content", settled(reasoning))
        yield from self._text("content", settled(content, self._stop))

    def finish(self, done: Completion) -> Iterator[bytes]:
        """The rest of the text, the calls, the finish reason, usage, [DONE]."""
        yield from self._text("reasoning_content", done.parsed.reasoning)
        yield from self._text("content", done.parsed.content)
        for index, call in enumerate(done.message.get("tool_calls", ())):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk({}, _finish(done, self._told_of_cut))
        if self._include_usage:
            yield event({**self._head, "choices": [], "usage": _usage(done)})
        yield b"data: [DONE]\n\n"

    def error(self, error: MilesError) -> bytes:
        """A failure after the headers went out.

        Agents (Qwen Code, pi) give up on an error event, but try again when a stream ends without a finish reason;
        OpenAI's Python SDK takes such an end for a whole answer, and raises on the event.
        """
        if status_of(error)[0] == 503 and not self._says_errors:
            return b": the engine is gone; send the request again\n\n"
        return event(ChatDialect().error_reply(error)[1])

    def _text(self, name: str, text: str) -> Iterator[bytes]:
        new = unsent(self._sent, name, text)
        if new:
            yield self._chunk({name: new})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        return event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def _message(message: Any, index: int) -> Message:
    if type(message) is dict and message.get("role") in _PLAIN and type(message.get("content")) is str:
        return message  # most of a long history
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise SessionError(f"messages[{index}].role must be one of {', '.join(sorted(_ROLES))}")
    text_of(message.get("content"))
    if not isinstance(message.get("tool_calls") or [], list):
        raise SessionError(f"messages[{index}].tool_calls must be a list")
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _tools(tools: Any) -> tuple[ToolSpec, ...]:
    good = isinstance(tools or [], list) and all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str)
        for t in tools or []
    )
    if not good:
        raise SessionError("tools must be a list of {type: function, function: {name, ...}}")
    return tuple(tools or ())


def _finish(done: Completion, told_of_cut: bool) -> str:
    if truncated(done, told_of_cut):
        return "length"
    return "tool_calls" if done.parsed.calls else "stop"


def _usage(done: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }

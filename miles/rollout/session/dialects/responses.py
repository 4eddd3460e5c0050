"""The OpenAI Responses dialect."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from miles.errors import MilesError
from miles.rollout.rendering.text import settled
from miles.rollout.session.dialects.base import Wishes, event, positive, status_of, truncated, unsent
from miles.rollout.session.dialects.chat import ChatDialect
from miles.rollout.session.dialects.items import Kinds, messages_of, tools_of
from miles.rollout.session.edges import read_hints
from miles.rollout.session.session import ChatRequest, Completion

__all__ = ["ResponsesDialect", "ResponsesStream"]

_RECORDED = (
    "temperature",
    "top_p",
    "top_logprobs",
    "reasoning",
    "include",
    "truncation",
    "parallel_tool_calls",
    "service_tier",
    "metadata",
)


class ResponsesDialect:
    """`POST /v1/responses`, `GET /v1/responses/{id}`."""

    def parse(self, body: dict[str, Any], headers: Mapping[str, str], wishes: Wishes) -> ChatRequest:
        """Check a request body; SessionError names the field that is wrong."""
        for name in ("background", "conversation", "prompt"):
            if body.get(name):
                wishes.forced(name, body[name])
        text = body.get("text")
        wanted = text.get("format") if isinstance(text, dict) else None
        if wanted not in (None, {"type": "text"}):
            wishes.forced("text.format", wanted)
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            wishes.forced("tool_choice", choice)
        wishes.record(body, *_RECORDED)
        tools = tools_of(body.get("tools"), wishes)
        messages = messages_of(body.get("instructions"), body.get("input"))
        previous = body.get("previous_response_id")
        return ChatRequest(
            messages=tuple(messages),
            tools=tools,
            max_tokens=positive(body.get("max_output_tokens"), "max_output_tokens"),
            may_call=choice != "none",
            model=str(body.get("model") or "policy"),
            previous=str(previous).removeprefix("resp_") if previous else None,
            hints=read_hints(headers, messages, tools, body),
            asked=wishes.asked,
        )

    def reply(self, done: Completion, request: ChatRequest, *, told_of_cut: bool) -> dict[str, Any]:
        """The whole reply as one JSON object."""
        cut = truncated(done, told_of_cut)
        return _response(
            done.token,
            request.model,
            status="incomplete" if cut else "completed",
            output=_items(done, Kinds.of(request.tools)),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=_usage(done),
        )

    def stream(
        self, request: ChatRequest, body: dict[str, Any], headers: Mapping[str, str], *, told_of_cut: bool
    ) -> "ResponsesStream":
        return ResponsesStream(request, told_of_cut=told_of_cut)

    def error_reply(self, error: MilesError) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, body, headers) in OpenAI's envelope."""
        return ChatDialect().error_reply(error)


class ResponsesStream:
    """created, then per item added, deltas and done, then completed with the whole output and usage."""

    keepalive = b": keepalive\n\n"

    def __init__(self, request: ChatRequest, *, told_of_cut: bool) -> None:
        self._request, self._told_of_cut = request, told_of_cut
        self._token = ""
        self._number = 0
        self._open: str | None = None
        self._done: list[dict[str, Any]] = []
        self._sent = {"reasoning": "", "message": ""}

    def start(self, token: str, prompt_tokens: int) -> Iterator[bytes]:
        self._token = token
        response = _response(token, self._request.model, status="in_progress", output=[])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def progress(self, content: str, reasoning: str) -> Iterator[bytes]:
        """Events for text known so far.

        No item is done before the generation is: Codex keeps the done items of a response that fails, and sends them
        back as half a turn. So text that follows reasoning, which would have to be done first, waits for the end.
        """
        yield from self._text("reasoning", settled(reasoning))
        if not self._sent["reasoning"]:
            yield from self._text("message", settled(content))

    def finish(self, done: Completion) -> Iterator[bytes]:
        """The rest of the items, then the whole response."""
        yield from self._text("reasoning", done.parsed.reasoning)
        yield from self._text("message", done.parsed.content)
        yield from self._close()
        for item in _items(done, Kinds.of(self._request.tools)):
            if item["type"] in ("function_call", "custom_tool_call"):
                yield from self._call(item)
        cut = truncated(done, self._told_of_cut)
        response = _response(
            self._token,
            self._request.model,
            status="incomplete" if cut else "completed",
            output=self._done,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=_usage(done),
        )
        yield self._event("response.incomplete" if cut else "response.completed", response=response)

    def error(self, error: MilesError) -> bytes:
        """A failure after the headers went out."""
        code = status_of(error)[1]
        response = _response(self._token, self._request.model, status="failed", output=self._done)
        failure = {"code": code if code == "context_length_exceeded" else "server_error", "message": str(error)}
        return self._event("response.failed", response={**response, "error": failure})

    def _call(self, item: dict[str, Any]) -> Iterator[bytes]:
        index, field = len(self._done), "input" if item["type"] == "custom_tool_call" else "arguments"
        kind = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        begun = {**item, "status": "in_progress", field: ""}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        where = {"item_id": item["id"], "output_index": index}
        yield self._event(f"response.{kind}.delta", **where, delta=item[field])
        yield self._event(f"response.{kind}.done", **where, **{field: item[field]})
        yield self._event("response.output_item.done", output_index=index, item=item)
        self._done.append(item)

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        if kind == "reasoning" and self._sent["message"]:
            return  # its item is done
        new = unsent(self._sent, kind, text)
        if not new:
            return
        if self._open != kind:
            yield from self._close()
            yield from self._begin(kind)
        yield self._event(f"response.{_PARTS[kind]}.delta", **self._where(kind), delta=new, **_MORE[kind])

    def _begin(self, kind: str) -> Iterator[bytes]:
        self._open = kind
        index, part = len(self._done), _PART[kind]
        yield self._event(
            "response.output_item.added", output_index=index, item=_item(kind, self._token, None, "in_progress")
        )
        added = "response.reasoning_summary_part.added" if kind == "reasoning" else "response.content_part.added"
        yield self._event(added, **self._where(kind), part={**part, "text": ""})

    def _close(self) -> Iterator[bytes]:
        kind, self._open = self._open, None
        if kind is None:
            return
        text, where = self._sent[kind], self._where(kind)
        yield self._event(f"response.{_PARTS[kind]}.done", **where, text=text, **_MORE[kind])
        done = "response.reasoning_summary_part.done" if kind == "reasoning" else "response.content_part.done"
        yield self._event(done, **where, part={**_PART[kind], "text": text})
        item = _item(kind, self._token, text, "completed")
        yield self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)

    def _where(self, kind: str) -> dict[str, Any]:
        place = "summary_index" if kind == "reasoning" else "content_index"
        return {"item_id": f"{_IDS[kind]}_{self._token}", "output_index": len(self._done), place: 0}

    def _event(self, name: str, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": name, "sequence_number": number, **data}, name)


_IDS = {"reasoning": "rs", "message": "msg"}
_PARTS = {"reasoning": "reasoning_summary_text", "message": "output_text"}
_PART: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "summary_text"},
    "message": {"type": "output_text", "annotations": [], "logprobs": []},
}
_MORE: dict[str, dict[str, Any]] = {"reasoning": {}, "message": {"logprobs": []}}


def _items(done: Completion, kinds: Kinds) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if done.parsed.reasoning:
        items.append(_item("reasoning", done.token, done.parsed.reasoning, "completed"))
    if done.parsed.content:
        items.append(_item("message", done.token, done.parsed.content, "completed"))
    for place, call in enumerate(done.message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"id": f"fc_{place}_{done.token}", "call_id": call["id"], "name": name, "status": "completed"}
        if name in kinds.custom:
            items.append({"type": "custom_tool_call", **item, "input": _custom_input(arguments)})
            continue
        space = {"namespace": kinds.namespaces[name]} if name in kinds.namespaces else {}
        items.append({"type": "function_call", **item, "arguments": arguments, **space})
    return items


def _item(kind: str, token: str, text: str | None, status: str) -> dict[str, Any]:
    parts = [] if text is None else [{**_PART[kind], "text": text}]
    if kind == "reasoning":
        return {"type": "reasoning", "id": f"rs_{token}", "summary": parts, "encrypted_content": token}
    return {"type": "message", "id": f"msg_{token}", "role": "assistant", "status": status, "content": parts}


def _custom_input(arguments: str) -> str:
    """The one text of a free-form tool; what the model wrote, if it did not write the object we showed it."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _response(token: str, model: str, *, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "id": f"resp_{token}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": model,
        "output": output,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": None,
        **more,
    }


def _usage(done: Completion) -> dict[str, Any]:
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens},
        "output_tokens": done.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }

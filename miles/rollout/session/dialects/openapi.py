"""The session server's own description, as OpenAPI 3.1: what it answers, not what clients may add and it ignores."""

from typing import Any

__all__ = ["OPENAPI"]

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 1}
_LOOSE = {"type": "object"}
_CONTENT = {
    "anyOf": [_TEXT, {"type": "array", "items": {"type": "object", "properties": {"type": _TEXT, "text": _TEXT}}}]
}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": _TEXT, "description": _TEXT, "parameters": _LOOSE},
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


_CHAT = _object(
    ["messages"],
    model=_TEXT,
    messages={
        "type": "array",
        "minItems": 1,
        "items": _object(
            ["role"],
            role={"enum": ["system", "developer", "user", "assistant", "tool"]},
            content=_CONTENT,
            tool_call_id=_TEXT,
        ),
    },
    tools={"type": "array", "items": _object(["type", "function"], type={"const": "function"}, function=_FUNCTION)},
    max_tokens=_COUNT,
    stop={"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    stream={"type": "boolean"},
    tool_choice={"enum": ["auto", "none"]},
)
_RESPONSES = _object(
    ["input"],
    model=_TEXT,
    instructions=_TEXT,
    input={
        "anyOf": [
            _TEXT,
            {"type": "array", "items": _object(["role"], role={"enum": ["user", "assistant"]}, content=_CONTENT)},
        ]
    },
    previous_response_id=_TEXT,
    max_output_tokens=_COUNT,
    stream={"type": "boolean"},
)
_MESSAGES = _object(
    ["messages", "max_tokens"],
    model=_TEXT,
    system=_CONTENT,
    messages={
        "type": "array",
        "minItems": 1,
        "items": _object(["role", "content"], role={"enum": ["user", "assistant"]}, content=_CONTENT),
    },
    max_tokens=_COUNT,
    stop_sequences={"type": "array", "items": _TEXT},
    stream={"type": "boolean"},
    tools={
        "type": "array",
        "items": _object(["name", "input_schema"], name=_TEXT, description=_TEXT, input_schema=_LOOSE),
    },
)
_ERRORS = {
    "400": "the request cannot be answered: bad field, context overflow, a limit, or the session has ended",
    "401": "no session with this key",
    "404": "no such thing in this session",
    "405": "this path has another method",
    "413": "the body is too large",
    "415": "unknown content encoding",
    "429": "too many requests in flight",
    "500": "a defect of the server",
    "502": "the engine gave no usable answer",
    "503": "the engine is gone or aborted; send the request again",
}


def _answers(*, stream: bool) -> dict[str, Any]:
    kinds = {"application/json": {"schema": _LOOSE}, **({"text/event-stream": {"schema": _TEXT}} if stream else {})}
    errors = {
        code: {"description": why, "content": {"application/json": {"schema": _LOOSE}}} for code, why in _ERRORS.items()
    }
    return {"200": {"description": "the answer", "content": kinds}, **errors}


def _post(summary: str, body: dict[str, Any], *, stream: bool = True) -> dict[str, Any]:
    return {
        "post": {
            "summary": summary,
            "security": [{"bearer": []}, {"key": []}],
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": _answers(stream=stream),
        }
    }


def _get(summary: str, *names: str) -> dict[str, Any]:
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    security: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]
    return {
        "get": {
            "summary": summary,
            "security": security,
            "parameters": parameters,
            "responses": _answers(stream=False),
        }
    }


OPENAPI: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {
        "title": "Miles session server",
        "version": "1",
        "description": "One private model endpoint for each episode. Every path also exists below /s/{session}.",
    },
    "paths": {
        "/v1/chat/completions": _post("OpenAI chat completions", _CHAT),
        "/v1/responses": _post("OpenAI Responses", _RESPONSES),
        "/v1/responses/{response}": _get("A stored response", "response"),
        "/v1/messages": _post("Anthropic Messages", _MESSAGES),
        "/v1/messages/count_tokens": _post("Tokens of a prompt", _MESSAGES, stream=False),
        "/v1/models": _get("The policy"),
        "/v1/models/{model}": _get("Any name: the policy", "model"),
    },
    "components": {
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    },
}

"""What the three dialects share: the contract, errors as HTTP, text that may be streamed already."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from miles.errors import ContextOverflow, EngineError, MilesError, SessionError
from miles.rollout.session.session import ChatRequest, Completion
from miles.types import Finish

__all__ = [
    "Dialect",
    "Stream",
    "Wishes",
    "check_messages",
    "event",
    "positive",
    "status_of",
    "stops_of",
    "truncated",
    "unsent",
]


class Stream(Protocol):
    """Makes the events of one streamed answer, in the order that the strictest client wants."""

    keepalive: bytes

    def start(self, token: str, prompt_tokens: int) -> Iterator[bytes]: ...
    def progress(self, content: str, reasoning: str) -> Iterator[bytes]: ...
    def finish(self, done: Completion) -> Iterator[bytes]: ...
    def error(self, error: MilesError) -> bytes: ...


class Dialect(Protocol):
    """A body becomes a ChatRequest, a Completion becomes a reply or events, an error becomes the client's envelope."""

    def parse(self, body: dict[str, Any], headers: Mapping[str, str], wishes: "Wishes") -> ChatRequest: ...
    def reply(self, done: Completion, request: ChatRequest, *, told_of_cut: bool) -> dict[str, Any]: ...
    def stream(
        self, request: ChatRequest, body: dict[str, Any], headers: Mapping[str, str], *, told_of_cut: bool
    ) -> Stream: ...
    def error_reply(self, error: MilesError) -> tuple[int, dict[str, Any], dict[str, str]]: ...


class Wishes:
    """Collects what a client asks for and does not get; refuses what would change the answer, unless told not to."""

    def __init__(self, *, refuse: bool) -> None:
        self._refuse = refuse
        self.asked: dict[str, object] = {}

    def record(self, body: Mapping[str, Any], *names: str) -> None:
        self.asked |= {name: body[name] for name in names if body.get(name) is not None}

    def forced(self, name: str, value: Any) -> None:
        """A wish that only constrained sampling could honour."""
        if self._refuse:
            shown = json.dumps(value, default=str)[:80]
            raise SessionError(
                f"{name}={shown} cannot be honoured exactly; leave it out, or set session.wishes=record to ignore it",
                code="unsupported_parameter",
            )
        self.asked[name] = value


def status_of(error: MilesError) -> tuple[int, str, dict[str, str]]:
    """(HTTP status, code, headers); only what may work again is called retryable."""
    status, code, headers = 500, "internal_error", {}
    if isinstance(error, SessionError):
        status, code = error.status, error.code
    elif isinstance(error, ContextOverflow):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, EngineError):
        status, code = (503, "engine_lost") if error.retryable else (502, "engine_error")
    if status in (429, 503):
        headers["Retry-After"] = "1"
    elif status == 500:
        headers["x-should-retry"] = "false"  # both official SDKs obey it
    return status, code, headers


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def stops_of(value: Any, name: str) -> tuple[str, ...]:
    """A client's stop strings."""
    if value is None or value == "" or value == []:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values) or len(values) > 16:
        raise SessionError(f"{name} must be a string or a list of at most 16 strings")
    return tuple(values)


def positive(value: Any, name: str) -> int | None:
    """A client's token limit."""
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise SessionError(f"{name} must be a positive integer")
    return value


def check_messages(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise SessionError(f"{name} must be a non-empty list")
    return value


def unsent(sent: dict[str, str], name: str, text: str) -> str:
    """What of a growing text the client has not got yet; noted in `sent`. Nothing when the text did not just grow."""
    before = sent[name]
    if not text.startswith(before):
        return ""
    sent[name] = text
    return text[len(before) :]


def truncated(done: Completion, told_of_cut: bool) -> bool:
    """Whether the client is to learn that its answer was cut at a limit."""
    return done.finish is Finish.LENGTH and told_of_cut

"""What dialects and sessions hand to each other."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from miles.rollout.engines.base import Engine
from miles.rollout.rendering.rendering import ParsedMessage, Rendering
from miles.rollout.session.edges import Hints
from miles.types import Finish, Message, ToolSpec

__all__ = ["ChatRequest", "Completion", "Flight", "Model"]


@dataclass(frozen=True, slots=True)
class Model:
    """An engine and the rendering of its tokenizer."""

    engine: Engine
    rendering: Rendering


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a dialect makes of a client's body. `asked` keeps what the client wanted and did not get.

    An assistant message may carry `turn_token`, the name that we gave the turn it was. `previous` is the token
    of a turn whose conversation comes before `messages`. `call_prefix` begins the ids of tool calls.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    may_call: bool = True
    model: str = "policy"
    previous: str | None = None
    call_prefix: str = "call_"
    hints: Hints = field(default_factory=Hints)
    asked: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the dialect answers with. `delivered()` is called just before the last byte goes out.

    `token` names the turn towards the client; `stop` is the client's stop string that ended it.
    """

    turn: int
    token: str
    parsed: ParsedMessage
    message: Message
    finish: Finish
    stop: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    delivered: Callable[[], None]


class Flight:
    """One generation that one or several identical requests wait for."""

    def __init__(self, rendering: Rendering) -> None:
        self.rendering = rendering
        self.token = secrets.token_hex(12)
        self.prompt_tokens: int | None = None
        self.tail: Sequence[int] = ()
        self.ids: tuple[int, ...] = ()
        self.task: asyncio.Task[Completion] | None = None
        self.waiters = 0
        self.grace: asyncio.TimerHandle | None = None
        self.progress = asyncio.Event()

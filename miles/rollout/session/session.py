"""One episode's recorder: plan where a request attaches, generate, commit a turn.

Planning changes nothing. The commit is atomic (one step of the event loop) and happens before the
last byte is sent. No lock is held while an engine works: requests from one turn become siblings.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from miles.errors import ContextOverflow, EngineError, SessionError
from miles.rollout.engines.base import Engine
from miles.rollout.session.matching import chain, root_key
from miles.rollout.session.rendering import ParsedMessage, Rendering
from miles.types import (
    Edge,
    Finish,
    Generated,
    GenerateRequest,
    Limits,
    Message,
    ToolSpec,
    Transcript,
    Tree,
    Turn,
)

__all__ = ["ChatRequest", "Completion", "Session"]

log = logging.getLogger(__name__)
_THREAD_ABOVE_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a dialect makes of a client's body. `asked` keeps what the client wanted and did not get."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    model: str = "policy"
    asked: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _Record:
    """A committed turn before the session ends; becomes a `Turn`."""

    id: int
    parent: int | None
    edge: Edge
    messages: tuple[Message, ...]
    message: Message
    prompt_ids: list[int]
    generated: Generated
    request_key: bytes
    asked: dict[str, object]
    delivered: bool = False
    continued: bool = False
    superseded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    parent: int | None
    edge: Edge
    messages: tuple[Message, ...]
    added_ids: list[int]
    prompt_ids: list[int]
    request_key: bytes
    max_tokens: int
    asked: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the dialect answers with. `delivered()` is called just before the last byte goes out."""

    turn: int
    parsed: ParsedMessage
    message: Message
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    delivered: Callable[[], None]


class _Flight:
    """One generation that one or several identical requests wait for."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Completion] | None = None
        self.waiters = 0
        self.ids: tuple[int, ...] = ()
        self.progress = asyncio.Event()


class Session:
    """Private endpoint state of one episode. `id` goes into the URL, `key` is the API key."""

    def __init__(
        self,
        engine: Engine,
        rendering: Rendering,
        *,
        limits: Limits | None = None,
        max_tokens: int = 1024,
        grace_s: float = 2.0,
        ttl_s: float = 3600.0,
        in_flight: int = 16,
    ) -> None:
        self.id = secrets.token_urlsafe(12)
        self.key = f"sk-miles-{secrets.token_urlsafe(24)}"
        self.expires = time.monotonic() + ttl_s
        self._failed: dict[bytes, str] = {}  # request key -> why its generation failed, until it succeeds
        self.refused: dict[str, int] = {}
        self._engine, self._rendering = engine, rendering
        self._limits = limits or Limits()
        self._max_tokens, self._grace_s, self._max_in_flight = max_tokens, grace_s, in_flight
        self._records: list[_Record] = []
        self._after: dict[bytes, int] = {}  # conversation key after a turn's answer -> newest such turn
        self._same: dict[bytes, list[int]] = {}  # request key -> turns that answered exactly this request
        self._flights: dict[bytes, _Flight] = {}
        self._sampled = self._reserved = 0
        self._ended = False

    @property
    def engine_failure(self) -> str | None:
        """Why a model call failed that never succeeded afterwards; None when there is none."""
        return next(iter(self._failed.values()), None)

    @property
    def waiting_for_engine(self) -> bool:
        """Whether a model call is being answered right now."""
        return bool(self._flights)

    async def complete(
        self, request: ChatRequest, on_tokens: Callable[[tuple[int, ...]], None] | None = None
    ) -> Completion:
        """Answer one request. Identical requests in flight share one generation.

        Cancelling (the client went away) aborts the generation after a grace time without waiters.
        Raises SessionError, ContextOverflow, EngineError.
        """
        self._refuse_if_ended()
        keys = chain(root_key(request.tools), request.messages)
        flight = self._flights.get(keys[-1])
        if flight is None:
            replay = self._undelivered(keys[-1])
            if replay is not None:
                return self._completion(replay)
            flight = self._launch(request, keys, streaming=on_tokens is not None)
        return await self._wait(flight, on_tokens)

    def _launch(self, request: ChatRequest, keys: list[bytes], *, streaming: bool) -> _Flight:
        if len(self._flights) >= self._max_in_flight:
            self._refuse("too many requests in flight in this session", status=429, code="rate_limit_exceeded")
        if len(self._records) + len(self._flights) >= self._limits.turns:
            self._refuse(f"this episode's {self._limits.turns} model calls are used up", code="turn_limit")
        flight = _Flight()
        self._flights[keys[-1]] = flight

        def on_tokens(ids: tuple[int, ...]) -> None:
            flight.ids = ids
            flight.progress.set()

        flight.task = asyncio.create_task(self._run(request, keys, on_tokens if streaming else None))
        flight.task.add_done_callback(lambda _: self._landed(keys[-1], flight))
        return flight

    def _landed(self, key: bytes, flight: _Flight) -> None:
        self._flights.pop(key, None)
        flight.progress.set()
        if flight.task is not None and not flight.task.cancelled():
            flight.task.exception()  # seen, even when every client has gone

    async def _wait(self, flight: _Flight, on_tokens: Callable[[tuple[int, ...]], None] | None) -> Completion:
        assert flight.task is not None
        flight.waiters += 1
        try:
            while on_tokens is not None and not flight.task.done():
                await flight.progress.wait()
                flight.progress.clear()
                if flight.ids:
                    on_tokens(flight.ids)
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.task.cancelled():
                self._refuse_if_ended()
                raise SessionError("the generation was aborted", status=503, code="aborted") from None
            raise
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                asyncio.get_running_loop().call_later(self._grace_s, self._abandon, flight)

    def _abandon(self, flight: _Flight) -> None:
        if flight.waiters == 0 and flight.task is not None:
            flight.task.cancel()

    async def _run(
        self, request: ChatRequest, keys: list[bytes], on_tokens: Callable[[tuple[int, ...]], None] | None
    ) -> Completion:
        plan = await self._plan(request, keys)
        self._reserved += plan.max_tokens  # parallel calls share one budget
        try:
            return await self._generate(request, plan, keys, on_tokens)
        except asyncio.CancelledError:
            if not self._ended:
                self._commit_aborted(plan)
            raise
        finally:
            self._reserved -= plan.max_tokens

    async def _generate(
        self,
        request: ChatRequest,
        plan: _Plan,
        keys: list[bytes],
        on_tokens: Callable[[tuple[int, ...]], None] | None,
    ) -> Completion:
        try:
            generated = await self._engine.generate(self._ask(plan), on_tokens)
            _check(generated)
            tools, ids = list(request.tools), list(generated.output_ids)
            parsed = await self._offload(len(ids) * 4, self._rendering.parse, ids, tools, plan.prompt_ids)
        except Exception as error:  # engine or parser: whatever the client makes of it, it is not the policy's fault
            self._failed[plan.request_key] = f"{type(error).__name__}: {error}"
            raise
        self._failed.pop(plan.request_key, None)
        self._refuse_if_ended()
        if generated.finish is Finish.ABORT:
            self._commit_aborted(plan)
            raise SessionError("the engine aborted the generation; send the request again", status=503, code="aborted")
        return self._completion(self._commit(plan, generated, _message(parsed), keys))

    async def _plan(self, request: ChatRequest, keys: list[bytes]) -> _Plan:
        """Find the deepest turn that the request continues; nothing changes."""
        parent, suffix = None, request.messages
        for place in range(len(keys) - 2, -1, -1):
            if keys[place] in self._after:
                parent, suffix = self._after[keys[place]], request.messages[place + 1 :]
                break
        size = sum(len(str(message.get("content"))) for message in suffix)
        tools, added = list(request.tools), None
        if parent is not None:
            before, output = self._prompt_of(parent), list(self._records[parent].generated.output_ids)
            added = await self._offload(size, self._rendering.bridge, before, output, list(suffix), tools)
            if added is not None:
                prompt_ids = [*before, *output, *added]
        if added is None:
            size = sum(len(str(message.get("content"))) for message in request.messages)
            added = prompt_ids = await self._offload(size, self._rendering.full, list(request.messages), tools)
            parent, suffix = None, request.messages
        return _Plan(
            parent=parent,
            edge=self._edge(parent, keys),
            messages=suffix,
            added_ids=added,
            prompt_ids=prompt_ids,
            request_key=keys[-1],
            max_tokens=self._room(request, len(prompt_ids)),
            asked=request.asked,
        )

    def _edge(self, parent: int | None, keys: list[bytes]) -> Edge:
        if keys[-1] in self._same:
            return Edge.RETRY
        if parent is None:
            return Edge.BRANCH if self._records else Edge.ROOT
        return Edge.BRANCH if self._records[parent].continued else Edge.EXTEND

    def _room(self, request: ChatRequest, prompt_tokens: int) -> int:
        limit = self._engine.context_length
        left = self._limits.tokens - self._sampled - self._reserved
        if prompt_tokens >= limit:
            raise ContextOverflow(prompt_tokens, limit)
        if left <= 0:
            self._refuse(f"this episode's {self._limits.tokens} sampled tokens are used up", code="token_limit")
        return max(1, min(request.max_tokens or self._max_tokens, self._max_tokens, limit - prompt_tokens, left))

    def _ask(self, plan: _Plan) -> GenerateRequest:
        return GenerateRequest(
            id=secrets.token_hex(6),
            session=self.id,
            prompt_ids=plan.prompt_ids,
            max_tokens=plan.max_tokens,
            stop_token_ids=self._rendering.stop_ids,
        )

    def _commit(self, plan: _Plan, generated: Generated, message: Message, keys: list[bytes]) -> int:
        turn = len(self._records)
        self._records.append(
            _Record(
                id=turn,
                parent=plan.parent,
                edge=plan.edge,
                messages=plan.messages,
                message=message,
                prompt_ids=plan.added_ids,
                generated=generated,
                request_key=plan.request_key,
                asked=plan.asked,
            )
        )
        self._sampled += len(generated.output_ids)
        self._same.setdefault(plan.request_key, []).append(turn)
        self._after[chain(keys[-1], [message])[0]] = turn
        if plan.parent is not None:
            self._continue(plan.parent)
        return turn

    def _continue(self, parent: int) -> None:
        """The client went on from `parent`: older answers to the same request are superseded."""
        record = self._records[parent]
        record.continued = record.delivered = True
        record.superseded = False
        for other in self._same[record.request_key]:
            if other < parent and not self._records[other].continued:
                self._records[other].superseded = True

    def _commit_aborted(self, plan: _Plan) -> None:
        nothing = Generated(output_ids=(), logprobs=(), versions=(), finish=Finish.ABORT)
        self._records.append(
            _Record(
                id=len(self._records),
                parent=plan.parent,
                edge=plan.edge,
                messages=plan.messages,
                message={"role": "assistant", "content": ""},
                prompt_ids=plan.added_ids,
                generated=nothing,
                request_key=plan.request_key,
                asked=plan.asked,
            )
        )

    def _undelivered(self, key: bytes) -> int | None:
        turns = self._same.get(key, [])
        return turns[-1] if turns and not self._records[turns[-1]].delivered else None

    def _completion(self, turn: int) -> Completion:
        record = self._records[turn]
        generated = record.generated

        def delivered() -> None:
            record.delivered = True

        calls = tuple((c["function"]["name"], c["function"]["arguments"]) for c in record.message.get("tool_calls", ()))
        return Completion(
            turn=turn,
            parsed=ParsedMessage(record.message["content"] or "", record.message.get("reasoning_content", ""), calls),
            message=record.message,
            finish=generated.finish,
            prompt_tokens=len(self._prompt_of(turn)),
            completion_tokens=len(generated.output_ids),
            cached_tokens=generated.cached_tokens,
            delivered=delivered,
        )

    def _prompt_of(self, turn: int) -> list[int]:
        """Ids that turn was sampled after."""
        pieces, at = [self._records[turn].prompt_ids], self._records[turn].parent
        while at is not None:
            record = self._records[at]
            pieces += [list(record.generated.output_ids), record.prompt_ids]
            at = record.parent
        return [token for piece in reversed(pieces) for token in piece]

    async def _offload(self, size: int, function: Callable, *args):  # type: ignore[no-untyped-def,type-arg]
        """Long texts are tokenised off the event loop, short ones at once (a thread costs more)."""
        return await asyncio.to_thread(function, *args) if size > _THREAD_ABOVE_CHARS else function(*args)

    def _refuse(self, message: str, *, status: int = 400, code: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1
        raise SessionError(message, status=status, code=code)

    def _refuse_if_ended(self) -> None:
        if self._ended or time.monotonic() > self.expires:
            self._refuse("this session has ended; nothing more is sampled for it", code="session_ended")

    async def close(self) -> Tree:
        """End the session: abort what is in flight, return everything recorded."""
        self._ended = True
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.tree()

    def tree(self) -> Tree:
        """The recorded turns so far."""
        return Tree(turns=tuple(_turn(record) for record in self._records))

    def transcript(self) -> Transcript:
        """Messages of the path to the newest turn: what scoring reads."""
        answered = [record.id for record in self._records if record.generated.finish is not Finish.ABORT]
        if not answered:
            return Transcript(messages=(), final_text="", turns=0)
        path = self.tree().path(answered[-1])
        messages = tuple(m for turn in path for m in (*turn.messages, turn.message))
        return Transcript(messages=messages, final_text=path[-1].message.get("content") or "", turns=len(answered))


def _turn(record: _Record) -> Turn:
    note = ""
    if record.generated.finish is Finish.ABORT:
        note = "aborted"
    elif record.superseded:
        note = "superseded"
    elif not record.delivered:
        note = "undelivered"
    return Turn(
        id=record.id,
        parent=record.parent,
        edge=record.edge,
        messages=record.messages,
        message=record.message,
        prompt_ids=tuple(record.prompt_ids),
        output_ids=record.generated.output_ids,
        logprobs=record.generated.logprobs,
        versions=record.generated.versions,
        finish=record.generated.finish,
        trainable=not note,
        note=note,
        asked=dict(record.asked),
    )


def _message(parsed: ParsedMessage) -> Message:
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": n, "arguments": a},
            }
            for n, a in parsed.calls
        ]
    return message


def _check(generated: Generated) -> None:
    """Refuse, never repair, a reply whose lists disagree."""
    lengths = {len(generated.output_ids), len(generated.logprobs), len(generated.versions)}
    if len(lengths) != 1:
        raise EngineError(
            f"engine returned {len(generated.output_ids)} ids, {len(generated.logprobs)} logprobs and "
            f"{len(generated.versions)} versions for one generation; the turn is refused"
        )
    if not generated.output_ids and generated.finish is not Finish.ABORT:
        raise EngineError("engine returned no tokens")

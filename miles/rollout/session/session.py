"""One episode's recorder: plan where a request attaches, generate, commit a turn.

Planning changes nothing. The commit is atomic (one step of the event loop) and happens before the
last byte is sent. No lock is held while an engine works: requests from one turn become siblings.
"""

import asyncio
import contextlib
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from miles.errors import ConfigError, ContextOverflow, EngineError, SessionError
from miles.harnesses.base import EnvTools, Progress
from miles.registry import resolve
from miles.rollout.engines.base import Engine
from miles.rollout.rendering.rendering import ParsedMessage, Rendering
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.matching import calls_of
from miles.rollout.session.recorder import Match, Place, Recorder
from miles.rollout.session.records import Ids, Record, first_tokens, packed
from miles.rollout.session.values import ChatRequest, Completion, Flight, Model
from miles.types import Edge, Finish, Generated, GenerateRequest, Limits, Message, ToolSpec, Transcript, Tree

__all__ = ["ChatRequest", "Completion", "Flight", "Model", "Session"]

_THREAD_ABOVE_CHARS = 4096
_PASSING = ("rate_limit_exceeded", "session_ended")
"""Refusals that say nothing of how an agent fares: it asks again, or nobody waits for it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    model: Model
    match: Match
    place: Place
    policy: bool
    trained: bool
    messages: tuple[Message, ...]
    added: Ids
    prompt: Ids
    max_tokens: int
    asked: dict[str, object]


OnProgress = Callable[[Flight], None]


class Session:
    """Private endpoint state of one episode. `id` goes into the URL, `key` is the API key."""

    def __init__(
        self,
        engine: Engine,
        rendering: Rendering,
        config: SessionConfig | None = None,
        *,
        limits: Limits | None = None,
        max_tokens: int = 1024,
        canonicalisers: Sequence[str] = (),
        others: Mapping[str, Model] | None = None,
        ttl_s: float | None = None,
    ) -> None:
        self.id = secrets.token_urlsafe(12)
        self.key = f"sk-miles-{secrets.token_urlsafe(24)}"
        self.config = config or SessionConfig()
        self.limits = limits or Limits()
        life_s = max(self.config.ttl_s, 1.1 * limits.wall_s if limits else 0.0) if ttl_s is None else ttl_s
        self.expires = time.monotonic() + life_s
        self.refused: dict[str, int] = {}
        self.tools = EnvTools(None, ())
        """What the environment offers over MCP."""
        self._last_refusal = ""
        self.recorder = Recorder()
        names = (*self.config.canonicalisers, *canonicalisers)
        self._canonicalisers = [(name, resolve("canonicalisers", name)) for name in names]
        self._models = {"policy": Model(engine, rendering), "untrained": Model(engine, rendering), **(others or {})}
        unknown = sorted(set(self.config.models.values()) - set(self._models))
        if unknown:
            raise ConfigError(f"session.models names {unknown[0]!r}; there is: {', '.join(self._models)}")
        self._max_tokens = max_tokens
        self._failed: dict[bytes, tuple[str, str]] = {}  # request key -> line, why its generation failed
        self._flights: dict[bytes, Flight] = {}
        self._leaving: set[asyncio.Task[Completion]] = set()
        self._replies = 0
        self._quiet = asyncio.Event()
        self._sampled = self._reserved = 0
        self._closing = self._ended = False

    @property
    def engine_failure(self) -> str | None:
        """Why a model call failed after which its conversation got no answer; None when there is none."""
        return next((why for _, why in self._failed.values()), None)

    @property
    def waiting_for_engine(self) -> bool:
        """Whether a model call is being answered right now."""
        return bool(self._flights)

    @property
    def turns(self) -> int:
        """How many turns are recorded."""
        return len(self.recorder.records)

    async def complete(self, request: ChatRequest, on_progress: OnProgress | None = None) -> Completion:
        """Answer one request. Identical requests in flight share one generation.

        Cancelling (the client went away) aborts the generation after a grace time without waiters.
        Raises SessionError, ContextOverflow, EngineError.
        """
        self._refuse_if_ended()
        model, match, asked = self._match(request)
        flight = self._flights.get(match.flight_key)
        if flight is None:
            replay = self.recorder.undelivered(match.flight_key)
            if replay is not None:
                return self._completion(replay)
            flight = self._launch(request, model, match, asked, streaming=on_progress is not None)
        return await self._wait(flight, on_progress)

    async def count(self, request: ChatRequest) -> int:
        """Tokens of the prompt that this request would be sampled after."""
        self._refuse_if_ended()
        model, match, _ = self._match(request)
        return len((await self._prompt(request, self._models[model], match))[2])

    def _match(self, request: ChatRequest) -> tuple[str, Match, dict[str, object]]:
        """(Engine name, place in the ledger, what the client asked for and what was done to its messages)."""
        model = next((to for name, to in self.config.models.items() if fnmatchcase(request.model, name)), "policy")
        messages: Sequence[Message] = self._with_previous(request)
        changed = []
        for name, change in self._canonicalisers:
            before, messages = messages, change(messages)
            if list(before) != list(messages):
                changed.append(name)
        asked = {**request.asked, "canonicalised": changed} if changed else request.asked
        options = (request.max_tokens, request.stop, request.may_call)
        try:
            match = self.recorder.match(messages, request.tools, model, options, request.hints)
        except RecursionError:
            raise SessionError("messages or tools are nested too deeply to compare") from None
        return model, match, asked

    def _with_previous(self, request: ChatRequest) -> tuple[Message, ...]:
        if request.previous is None:
            return request.messages
        turn = self.recorder.turn_of(request.previous)
        if turn is None:
            raise SessionError(
                "previous_response_id names no stored response of this session", code="previous_response_not_found"
            )
        lead = [m for m in request.messages if m.get("instructions")]
        before = [m for m in self.recorder.history(turn, named=True) if not m.get("instructions")]
        return (*lead, *before, *(m for m in request.messages if not m.get("instructions")))

    def _launch(
        self, request: ChatRequest, model: str, match: Match, asked: dict[str, object], *, streaming: bool
    ) -> Flight:
        if len(self._flights) >= self.config.in_flight:
            self._refuse("too many requests in flight in this session", status=429, code="rate_limit_exceeded")
        if self.turns + len(self._flights) >= self.limits.turns:
            self._refuse(f"this episode's {self.limits.turns} model calls are used up", code="turn_limit")
        flight = Flight(self._models[model].rendering)
        self._flights[match.flight_key] = flight
        flight.task = asyncio.create_task(self._run(request, model, match, asked, flight, streaming))
        flight.task.add_done_callback(lambda _: self._landed(match.flight_key, flight))
        return flight

    def _landed(self, key: bytes, flight: Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        flight.progress.set()
        if flight.task is not None and not flight.task.cancelled():
            flight.task.exception()  # seen, even when every client has gone

    async def _wait(self, flight: Flight, on_progress: OnProgress | None) -> Completion:
        assert flight.task is not None
        flight.waiters += 1
        if flight.grace is not None:
            flight.grace.cancel()
        try:
            while on_progress is not None and not flight.task.done():
                if flight.prompt_tokens is not None:
                    on_progress(flight)
                await flight.progress.wait()
                flight.progress.clear()
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.task.cancelled():
                self._refuse_if_ended()
                raise SessionError("the generation was aborted", status=503, code="aborted") from None
            raise
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                loop = asyncio.get_running_loop()
                flight.grace = loop.call_later(self.config.grace_s, self._abandon, flight)

    def _abandon(self, flight: Flight) -> None:
        if flight.waiters == 0 and flight.task is not None:
            for key in [key for key, other in self._flights.items() if other is flight]:
                del self._flights[key]  # whoever asks again now gets a flight of its own
            self._leaving.add(flight.task)
            flight.task.add_done_callback(self._leaving.discard)
            flight.task.cancel()

    async def _run(
        self,
        request: ChatRequest,
        model: str,
        match: Match,
        asked: dict[str, object],
        flight: Flight,
        streaming: bool,
    ) -> Completion:
        plan = await self._plan(request, model, match, asked)
        flight.prompt_tokens, flight.tail = len(plan.prompt), plan.added[-plan.model.rendering.looks_back :]
        flight.progress.set()
        self._reserved += plan.max_tokens  # parallel calls share one budget
        try:
            return await self._generate(request, plan, flight, streaming)
        except asyncio.CancelledError:
            if self._ended:
                self.recorder.counters["aborted_at_end"] += 1
            else:
                self._commit(plan, _NOTHING, _EMPTY, request, flight)
            raise
        finally:
            self._reserved -= plan.max_tokens

    async def _generate(self, request: ChatRequest, plan: _Plan, flight: Flight, streaming: bool) -> Completion:
        def on_tokens(ids: tuple[int, ...]) -> None:
            flight.ids = ids
            flight.progress.set()

        rendering, key = plan.model.rendering, plan.match.request_key
        try:
            generated = await plan.model.engine.generate(
                self._ask(request, plan, flight), on_tokens if streaming else None
            )
            _check(generated)
            tools = list(request.tools) if request.may_call else []
            ids, tail = list(generated.output_ids), list(flight.tail)
            parsed = await self._offload(len(ids) * 4, rendering.parse, ids, tools, tail)
            count, stop = rendering.cut(ids, request.stop, parsed, tools, tail)
        except Exception as error:  # engine or parser: whatever the client makes of it, it is not the policy's fault
            self._failed[key] = (plan.place.line, f"{type(error).__name__}: {error}")
            raise
        # The agent got over what failed before in this conversation: it was answered.
        self._failed = {k: (line, why) for k, (line, why) in self._failed.items() if line != plan.place.line}
        if self._ended:
            self._refuse_if_ended()
        if not request.may_call:
            parsed = parsed.without_calls()
        if stop is not None:
            generated, parsed = first_tokens(generated, count), parsed.cut(stop)
        turn = self._commit(plan, generated, parsed, request, flight, stop)
        if generated.finish is Finish.ABORT:
            self._failed[key] = (plan.place.line, "the engine broke a generation off, and it was not asked for again")
            raise SessionError("the engine aborted the generation; send the request again", status=503, code="aborted")
        return self._completion(turn)

    async def _plan(self, request: ChatRequest, name: str, match: Match, asked: dict[str, object]) -> _Plan:
        """Where the turn will hang and what it is sampled after; nothing of the tree changes."""
        model = self._models[name]
        parent, suffix, prompt, added = await self._prompt(request, model, match)
        if request.hints.edge is not Edge.COMPACTION_REQUEST:
            self.recorder.count_edits(match)
        place = self.recorder.place(match, parent, request.hints)
        switches = {"side": self.config.train_side, "compaction": self.config.train_compaction}
        return _Plan(
            model=model,
            match=match,
            place=place,
            policy=name == "policy",
            trained=name == "policy" and switches.get(place.line, True),
            messages=tuple(suffix),
            added=added,
            prompt=prompt,
            max_tokens=self._room(request, model.engine, len(prompt)),
            asked=asked,
        )

    async def _prompt(
        self, request: ChatRequest, model: Model, match: Match
    ) -> tuple[int | None, list[Message], Ids, Ids]:
        """(Turn whose ids are extended, messages after it, all ids, ids after it)."""
        tools, records = list(request.tools), self.recorder.records
        if match.parent is not None and all(m.get("role") != "assistant" for m in match.suffix):
            parent = records[match.parent]
            tail, output = list(parent.prompt[-model.rendering.looks_back :]), list(parent.output)
            tokens = await self._offload(_size(match.suffix), model.rendering.bridge, tail, output, match.suffix, tools)
            if tokens is not None:
                added = array("i", tokens)
                return match.parent, match.suffix, records.path_ids(match.parent) + added, added
        messages = self.recorder.renderable(match.messages)
        whole = await self._offload(_size(messages, tools), model.rendering.full, messages, tools)
        prompt = array("i", whole)
        at, suffix = self.recorder.attach(match, prompt)
        return at, suffix, prompt, prompt if at is None else prompt[len(records.path_ids(at)) :]

    def context_of(self, engine: Engine) -> int:
        """Tokens of prompt and answer of one call: what the engine can and this session may."""
        return min(engine.context_length, self.limits.context or engine.context_length)

    def _room(self, request: ChatRequest, engine: Engine, prompt_tokens: int) -> int:
        limit = self.context_of(engine)
        left = self.limits.tokens - self._sampled - self._reserved
        if prompt_tokens >= limit:
            self.count_refusal("context_length_exceeded")
            raise ContextOverflow(prompt_tokens, limit)
        if left <= 0 and self._sampled < self.limits.tokens:
            self._refuse("calls in flight hold the rest of the tokens", status=429, code="rate_limit_exceeded")
        if left <= 0:
            self._refuse(f"this episode's {self.limits.tokens} sampled tokens are used up", code="token_limit")
        return max(1, min(request.max_tokens or self._max_tokens, self._max_tokens, limit - prompt_tokens, left))

    def _ask(self, request: ChatRequest, plan: _Plan, flight: Flight) -> GenerateRequest:
        return GenerateRequest(
            id=flight.token,
            session=self.id,
            prompt_ids=plan.prompt,
            max_tokens=plan.max_tokens,
            stop_token_ids=plan.model.rendering.stop_ids,
            routing_from=max(0, len(plan.prompt) - len(plan.added) - 1),
        )

    def _commit(
        self,
        plan: _Plan,
        generated: Generated,
        parsed: ParsedMessage,
        request: ChatRequest,
        flight: Flight,
        stop: str | None = None,
    ) -> int:
        turn = self.turns
        record = Record(
            id=turn,
            parent=plan.place.parent,
            origin=plan.place.origin,
            edge=plan.place.edge,
            line=plan.place.line,
            messages=plan.messages,
            message=parsed.message(request.call_prefix),
            prompt=plan.added,
            request_key=plan.match.request_key,
            prompt_tokens=len(plan.prompt),
            token=flight.token,
            stop=stop,
            policy=plan.policy,
            trained=plan.trained,
            guessed=request.hints.edge is plan.place.edge and not request.hints.sure,
            asked=plan.asked,
            wire=request.hints.wire,
            **packed(generated),
        )
        self._sampled += len(generated.output_ids)
        self._last_refusal = ""
        self.recorder.commit(record, plan.match, request.hints, plan.prompt)
        return turn

    def answer_of(self, token: str) -> Completion:
        """A committed turn by the token that its client knows; SessionError when there is none."""
        turn = self.recorder.turn_of(token)
        if turn is None:
            raise SessionError("no stored response with this id in this session", status=404, code="not_found")
        return self._completion(turn)

    def _completion(self, turn: int) -> Completion:
        record = self.recorder.records[turn]

        def delivered() -> None:
            record.delivered = True

        return Completion(
            turn=turn,
            token=record.token,
            parsed=ParsedMessage.of(record.message),
            message=record.message,
            finish=record.finish,
            stop=record.stop,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=len(record.output),
            cached_tokens=record.cached_tokens,
            delivered=delivered,
        )

    async def _offload(self, size: int, function: Callable, *args):  # type: ignore[no-untyped-def,type-arg]
        """Long texts are tokenised off the event loop, short ones at once (a thread costs more)."""
        return await asyncio.to_thread(function, *args) if size > _THREAD_ABOVE_CHARS else function(*args)

    def count_refusal(self, code: str) -> None:
        """Note that a request was refused, for the report."""
        self.refused[code] = self.refused.get(code, 0) + 1
        if code not in _PASSING:
            self._last_refusal = code

    def _refuse(self, message: str, *, status: int = 400, code: str) -> None:
        self.count_refusal(code)
        raise SessionError(message, status=status, code=code)

    def _refuse_if_ended(self) -> None:
        if self._closing or time.monotonic() > self.expires:
            self._refuse("this session has ended; nothing more is sampled for it", code="session_ended")

    async def close(self) -> Tree:
        """End the session: wait `drain_s` for what is in flight, abort the rest, return everything recorded."""
        self._closing = True  # no new requests, while those in flight may land
        tasks = [*(flight.task for flight in self._flights.values() if flight.task is not None), *self._leaving]
        if self.config.drain_s and not self._ended:
            await self._drain(tasks)
        self._ended = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.tree()

    async def _drain(self, tasks: Sequence["asyncio.Task[Completion]"]) -> None:
        """Wait for generations, then for their answers to be sent: what was sent is delivered."""
        until = time.monotonic() + self.config.drain_s
        if tasks:
            await asyncio.wait(tasks, timeout=self.config.drain_s)
        while self._replies and time.monotonic() < until:
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), max(0.0, until - time.monotonic()))

    @contextlib.contextmanager
    def replying(self) -> Iterator[None]:
        """Around the sending of an answer, so that a drain can wait for it."""
        self._replies += 1
        try:
            yield
        finally:
            self._replies -= 1
            self._quiet.set()

    def tree(self) -> Tree:
        """The recorded turns so far."""
        return self.recorder.records.tree()

    def transcript(self) -> Transcript:
        """Messages of the path to the newest turn of the main line: what scoring reads."""
        answered = [record for record in self.recorder.records.all if record.finish is not Finish.ABORT]
        if not answered:
            return Transcript(messages=(), final_text="", turns=0)
        newest = next((record for record in reversed(answered) if record.line == "main"), answered[-1])
        messages = tuple(self.recorder.history(newest.id))
        return Transcript(messages=messages, final_text=newest.message.get("content") or "", turns=len(answered))

    def progress(self) -> Progress:
        """How far the agent has come, for whoever must tell how it ended."""
        newest = self.recorder.newest_main
        called = newest is not None and bool(calls_of(newest.message))
        return Progress(turns=self.turns, refusal=self._last_refusal, open_calls=called)

    def report(self) -> dict[str, Any]:
        """Numbers for logs: turns, reuse of prefixes, forks and edits by cause, refusals."""
        refused = {f"refused/{code}": count for code, count in sorted(self.refused.items())}
        return {**self.recorder.report(), **refused}


_EMPTY = ParsedMessage("", "", ())
_NOTHING = Generated(output_ids=(), logprobs=(), versions=(), finish=Finish.ABORT)


def _size(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
    """Roughly the letters that will be rendered."""
    texts = sum(len(str(m.get("content"))) + 200 * len(m.get("tool_calls") or ()) for m in messages)
    return texts + 300 * len(tools)


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
    try:
        ids = array("i", generated.output_ids)
    except (TypeError, OverflowError) as error:
        raise EngineError(f"engine returned something that is no token id ({error}); the turn is refused") from error
    if ids and min(ids) < 0:
        raise EngineError("engine returned a negative token id; the turn is refused")

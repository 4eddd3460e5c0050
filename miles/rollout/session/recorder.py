"""The ledger of one session: which turn a request continues, what was committed, how branches came to be.

Everything here is synchronous and engine-free: a commit is one step of the event loop.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from miles.rollout.rendering.text import text_of
from miles.rollout.session.edges import Hints, Origins, task_of
from miles.rollout.session.matching import Lines, calls_of, chain, root_key
from miles.rollout.session.records import Ids, Record, Records
from miles.types import LINES, Edge, Finish, Message, ToolSpec

__all__ = ["Match", "Place", "Recorder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A request in the ledger's terms. `parent` is the deepest recorded turn that the request continues.

    `request_key` is equal for equal conversations, `flight_key` for requests that may share one answer.
    """

    messages: list[Message]
    keys: list[bytes]
    start: bytes
    flight_key: bytes
    parent: int | None
    suffix: list[Message]

    @property
    def request_key(self) -> bytes:
        return self.keys[-1] if self.keys else self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a turn hangs, and which conversation that is."""

    parent: int | None
    origin: int | None
    edge: Edge
    line: str


class Recorder:
    """Turns of one session and the indexes over them. `counters` says what clients did to their history."""

    def __init__(self) -> None:
        self.records = Records()
        self.counters: Counter[str] = Counter()
        self._lines = Lines()
        self._after: dict[bytes, list[int]] = {}  # conversation key after an answer -> turns that gave it
        self._same: dict[bytes, list[int]] = {}  # request key -> turns that answered exactly this request
        self._by_flight: dict[bytes, int] = {}
        self._by_token: dict[str, int] = {}
        self._by_call: dict[str, int] = {}
        self._by_agent: dict[str, int] = {}
        self._origins = Origins()
        self._main_tasks: set[str] = set()
        self._newest_main: int | None = None

    def match(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        model: str,
        options: Sequence[object],
        hints: Hints | None = None,
    ) -> Match:
        """Find the deepest turn that the request continues; nothing changes but the memory of equal messages."""
        start = root_key(tools, model, _agent(hints) if hints is not None else "")
        keys, kept = self._lines.chain(start, messages)
        parent, first = None, 0
        for place in range(len(keys) - 2, -1, -1):
            turns = self._after.get(keys[place])
            if turns:
                parent, first = self._named(turns, kept[place]), place + 1
                break
        flight = hashlib.blake2b((keys[-1] if keys else start) + repr(options).encode(), digest_size=16).digest()
        return Match(messages=kept, keys=keys, start=start, flight_key=flight, parent=parent, suffix=kept[first:])

    def _named(self, turns: list[int], message: Message) -> int:
        """Of several turns with this answer, the one whose token the client sent back, or the newest."""
        named = self._by_token.get(str(message.get("turn_token")))
        return named if named in turns else turns[-1]

    @property
    def newest_main(self) -> Record | None:
        """The newest turn of the main line."""
        return self.records[self._newest_main] if self._newest_main is not None else None

    def turn_of(self, token: str) -> int | None:
        """The turn that a token of ours names."""
        return self._by_token.get(token)

    def undelivered(self, flight_key: bytes) -> int | None:
        """A finished answer to this very request that no client has received."""
        turn = self._by_flight.get(flight_key)
        return turn if turn is not None and not self.records[turn].delivered else None

    def attach(self, match: Match, prompt: Ids) -> tuple[int | None, list[Message]]:
        """(Deepest turn above the match whose ids begin `prompt`, messages after it): prompts share what they can."""
        at, first = match.parent, len(match.messages) - len(match.suffix)
        while at is not None:
            ids = self.records.path_ids(at)
            if len(ids) < len(prompt) and prompt[: len(ids)] == ids:
                return at, match.messages[first:]
            first -= len(self.records[at].messages) + 1
            at = self.records[at].parent
        return None, match.messages

    def place(self, match: Match, parent: int | None, hints: Hints) -> Place:
        """How the turn hangs in the tree. `parent` is the turn whose ids it extends."""
        if parent is not None and hints.edge is None:
            self._reconsider(self.records[parent])
        edge, origin = self._edge(match, parent, hints)
        line = LINES.get(edge)
        if line is None:
            above = parent if parent is not None else origin
            if edge is Edge.COMPACTED and origin is not None:  # goes on in the place of what was summarised
                summary = self.records[origin]
                above = summary.parent if summary.parent is not None else summary.origin
            line = self.records[above].line if above is not None else "main"
        return Place(parent=parent, origin=origin, edge=edge, line=line)

    def _reconsider(self, record: Record) -> None:
        """A turn that was taken for a summary or a side call by its words, and is simply gone on from, was neither."""
        if record.guessed and record.parent is not None and record.line in ("compaction", "side"):
            record.edge, record.line, record.guessed = Edge.EXTEND, self.records[record.parent].line, False
            record.trained = record.policy
            self.counters["guess_taken_back"] += 1
            if record.line == "main":
                self._newest_main = max(self._newest_main or 0, record.id)

    def _edge(self, match: Match, parent: int | None, hints: Hints) -> tuple[Edge, int | None]:
        if hints.edge in (Edge.SIDE, Edge.COMPACTION_REQUEST):
            return hints.edge, None if parent is not None else self._newest_main
        if match.request_key in self._same:
            return Edge.RETRY, None if parent is not None else self._same[match.request_key][0]
        if parent is not None:
            extends = parent == match.parent and not self.records[parent].continued
            return Edge.EXTEND if extends else Edge.BRANCH, None
        if match.parent is not None:  # continues that turn in words, but the template renders it anew
            return Edge.BRANCH, match.parent
        origin = self._origins.compacted(match.messages)
        if origin is not None:
            return Edge.COMPACTED, origin
        agent = _agent(hints)
        if agent and agent in self._by_agent:
            return Edge.BRANCH, self._by_agent[agent]
        origin = self._origins.spawner([t for t in task_of(match.messages) if t not in self._main_tasks])
        if origin is not None or hints.edge is Edge.SUBAGENT:
            if origin is None:
                self.counters["subagent_unlinked"] += 1
            return Edge.SUBAGENT, origin
        return Edge.ROOT if self._newest_main is None else Edge.BRANCH, None

    def commit(self, record: Record, match: Match, hints: Hints, prompt: Ids) -> None:
        """Add a turn and make it findable."""
        turn = record.id
        self.records.add(record, prompt)
        self._by_token[record.token] = turn
        self._same.setdefault(match.request_key, []).append(turn)
        if record.finish is not Finish.ABORT:
            self._by_flight[match.flight_key] = turn
        if record.output:
            self._after.setdefault(_key_after(match, record.message), []).append(turn)
        for call, _, _ in calls_of(record.message):
            self._by_call[call] = turn
        agent = _agent(hints)
        if agent:
            self._by_agent[agent] = turn
        self._origins.add(turn, record.message, record.edge)
        if record.line == "main":
            self._newest_main = turn
        if record.edge is Edge.ROOT:
            self._main_tasks.update(task_of(match.messages))
        if record.parent is not None and record.finish is not Finish.ABORT:
            self._continue(record.parent, aside=record.line != self.records[record.parent].line)

    def _continue(self, parent: int, *, aside: bool) -> None:
        """The client went on from `parent`: older answers to the same request are superseded.

        A summary or a side call is asked `aside`: the conversation itself may still go on from the same turn.
        """
        record = self.records[parent]
        record.delivered = True
        record.continued = record.continued or not aside
        record.superseded = False
        for other in self._same[record.request_key]:
            if other < parent and not self.records[other].continued:
                self.records[other].superseded = True

    def count_edits(self, match: Match) -> None:
        """Count what the client changed in answers of ours that it sent back."""
        if match.parent is not None:
            said = match.messages[len(match.messages) - len(match.suffix) - 1]
            if self.records[match.parent].message.get("reasoning_content") and not said.get("reasoning_content"):
                self.counters["reasoning_dropped"] += 1
        for message in match.suffix:
            if message.get("role") == "assistant":
                cause = self._cause(message)
                self.counters[f"replay_edited/{cause}" if cause != "history" else "replayed_elsewhere"] += 1

    def _cause(self, message: Message) -> str:
        calls = calls_of(message)
        turn = self._by_token.get(str(message.get("turn_token")))
        if turn is None:
            turn = next((self._by_call[call] for call, _, _ in calls if call in self._by_call), None)
        if turn is None:
            return "not_ours"
        ours = self.records[turn].message
        if text_of(ours.get("content")) != text_of(message.get("content")):
            return "text"
        return "calls" if calls_of(ours) != calls else "history"

    def renderable(self, messages: Sequence[Message]) -> list[Message]:
        """Calls of ours with broken JSON made into objects, since templates insist on objects."""
        return [self._renderable(m) if m.get("tool_calls") else m for m in messages]

    def _renderable(self, message: Message) -> Message:
        calls = []
        for call, (name, _, arguments) in zip(message["tool_calls"], calls_of(message), strict=True):
            if name in self._by_call and not isinstance(arguments, dict):
                call = {**call, "function": {**call["function"], "arguments": {"malformed": arguments}}}
            calls.append(call)
        return {**message, "tool_calls": calls}

    def history(self, turn: int, *, named: bool = False) -> list[Message]:
        """Messages of the conversation up to and with a turn's answer; `named` marks answers with their turns."""
        messages: list[Message] = []
        for record in self.records.path(turn):
            answer = {**record.message, "turn_token": record.token} if named else record.message
            messages += [*record.messages, answer]
        return messages

    def report(self) -> dict[str, float]:
        """Numbers about prefix reuse, forks and edits."""
        records = self.records.all
        prompts = sum(record.prompt_tokens for record in records)
        added = sum(len(record.prompt) for record in records)
        edges = Counter(record.edge.value for record in records)
        parents = {record.parent for record in records}
        for record in records:
            if record.edge is Edge.COMPACTED and record.origin is not None:  # goes on from what was summarised
                parents |= {records[record.origin].parent, records[record.origin].origin}
        ends = [r for r in records if r.line == "main" and r.id not in parents and not r.superseded]
        return {
            "turns": len(records),
            "abandoned": max(0, len(ends) - 1),  # main-line turns that the client left for another branch
            "prefix_reused": 1 - added / prompts if prompts else 0.0,
            **{f"edge/{name}": count for name, count in sorted(edges.items())},
            **dict(sorted(self.counters.items())),
        }


def _agent(hints: Hints) -> str:
    """The client's own name of the sub-agent that asks; empty for the main one."""
    if hints.edge is not Edge.SUBAGENT:
        return ""
    thread = hints.wire.get("thread") if "parent_thread" in hints.wire else None
    session = hints.wire.get("session") if "parent_session" in hints.wire else None
    return hints.wire.get("agent") or thread or session or ""


def _key_after(match: Match, message: Message) -> bytes:
    return chain(match.request_key, [message])[0]

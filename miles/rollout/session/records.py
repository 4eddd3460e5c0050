"""What a session keeps of its turns: flat arrays, four bytes an id and eight a logprob."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from miles.types import Edge, Finish, Generated, Message, Routing, Tree, Turn

__all__ = ["Ids", "Record", "Records", "first_tokens", "packed"]

if TYPE_CHECKING:
    Ids = array[int]
    Reals = array[float]
else:  # an array takes no parameter before Python 3.12
    Ids = Reals = array


@dataclass(slots=True, kw_only=True)
class Record:
    """A committed turn before the session ends; becomes a `Turn`. Versions are run lengths: (version, count)."""

    id: int
    parent: int | None
    origin: int | None
    edge: Edge
    line: str
    messages: tuple[Message, ...]
    message: Message
    prompt: Ids
    output: Ids
    logprobs: Reals
    versions: list[tuple[int, int]]
    finish: Finish
    request_key: bytes
    prompt_tokens: int
    token: str
    cached_tokens: int = 0
    routing: Routing | None = None
    stop: str | None = None
    policy: bool = True
    trained: bool = True
    guessed: bool = False
    delivered: bool = False
    continued: bool = False
    superseded: bool = False
    asked: dict[str, Any] = field(default_factory=dict)
    wire: dict[str, str] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """Why the turn is not trained; empty when it is."""
        if self.finish is Finish.ABORT:
            return "aborted"
        if not self.trained:
            return "untrained"
        if self.superseded:
            return "superseded"
        return "" if self.delivered else "undelivered"

    def turn(self) -> Turn:
        versions = tuple(version for version, count in self.versions for _ in range(count))
        return Turn(
            id=self.id,
            parent=self.parent,
            origin=self.origin,
            edge=self.edge,
            messages=tuple(_public(message) for message in self.messages),
            message=self.message,
            prompt_ids=tuple(self.prompt),
            output_ids=tuple(self.output),
            logprobs=tuple(None if value != value else value for value in self.logprobs),
            versions=versions,
            finish=self.finish,
            trainable=not self.note,
            note=self.note,
            asked=dict(self.asked),
            wire=dict(self.wire),
            routing=self.routing,
        )


class Records:
    """The turns of one session, and the ids of whole paths. The newest path is kept flat, the others are joined."""

    def __init__(self) -> None:
        self.all: list[Record] = []
        self._flat: tuple[int, Ids] | None = None

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, turn: int) -> Record:
        return self.all[turn]

    def add(self, record: Record, prompt: Ids | None = None) -> None:
        """Append a turn; `prompt` is the flat prompt it was sampled after, if the caller has it."""
        self.all.append(record)
        if self._flat is not None and self._flat[0] == record.parent:
            flat = self._flat[1]  # grown in place: the cost of a turn is that of its own tokens
            flat.extend(record.prompt)
            flat.extend(record.output)
            self._flat = (record.id, flat)
        elif prompt is not None:
            self._flat = (record.id, prompt + record.output)

    def path_ids(self, turn: int) -> Ids:
        """All ids up to the end of a turn's output. Neither change the array nor keep it: it may grow."""
        if self._flat is not None and self._flat[0] == turn:
            return self._flat[1]
        pieces: list[Ids] = []
        at: int | None = turn
        while at is not None:
            if self._flat is not None and self._flat[0] == at:
                pieces.append(self._flat[1])
                break
            record = self.all[at]
            pieces += [record.output, record.prompt]
            at = record.parent
        joined: Ids = array("i")
        for piece in reversed(pieces):
            joined.extend(piece)
        return joined

    def path(self, turn: int) -> list[Record]:
        """Records from the root to a turn."""
        chain: list[Record] = []
        at: int | None = turn
        while at is not None:
            chain.append(self.all[at])
            at = self.all[at].parent
        return chain[::-1]

    def tree(self) -> Tree:
        return Tree(turns=tuple(record.turn() for record in self.all))

    @property
    def bytes(self) -> int:
        """Memory of ids, logprobs and the flat path; messages not counted."""
        kept = sum(len(r.prompt) * 4 + len(r.output) * 4 + len(r.logprobs) * 8 for r in self.all)
        return kept + (len(self._flat[1]) * 4 if self._flat is not None else 0)


def _public(message: Message) -> Message:
    """Without the marks that dialects put on messages for the session."""
    return {name: value for name, value in message.items() if name not in ("turn_token", "instructions")}


def packed(generated: Generated) -> dict[str, Any]:
    """A generation as a record's arrays. A logprob that is not a number is kept as one that is unknown."""
    return {
        "output": array("i", generated.output_ids),
        "logprobs": array("d", (math.nan if value is None else value for value in generated.logprobs)),
        "versions": _runs(generated.versions),
        "finish": generated.finish,
        "cached_tokens": generated.cached_tokens,
        "routing": generated.routing,
    }


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs


def first_tokens(generated: Generated, count: int) -> Generated:
    """The first tokens of a generation: what is sampled by the same process when it stops there."""
    return replace(
        generated,
        output_ids=generated.output_ids[:count],
        logprobs=generated.logprobs[:count],
        versions=generated.versions[:count],
        finish=Finish.STOP,
    )

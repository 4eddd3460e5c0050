"""The words of Miles, one page: values that cross rooms, and the protocols where rooms meet.

Values are frozen, slotted, keyword-only and JSON-able (`to_json` / `from_json`); tensors never
appear here. Lengths in tokens, times in seconds, versions are integers that name published weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field, TypeAdapter

Message = dict[str, Any]
"""One chat message in the OpenAI shape: role, content, tool_calls, tool_call_id, reasoning_content."""
ToolSpec = dict[str, Any]
"""One tool in the OpenAI shape: {"type": "function", "function": {name, description, parameters}}."""
WeightVersion = int
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one episode may use. The wall clock covers everything from the sandbox to the score."""

    turns: int = 32
    tokens: int = 1 << 20
    """Sampled tokens of all turns together."""
    wall_s: float = 600.0
    context: int | None = None
    """Tokens of prompt and answer of one model call; None: what the engine can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. `data` is the environment's own (files, answer, seed); `id` is unique in its taskset."""

    id: str
    prompt: tuple[Message, ...]
    data: dict[str, Any] = field(default_factory=dict)
    split: str = "train"
    limits: Limits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees after reset or step: chat messages to append, and the tools offered."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Answer of `Env.step`: Gymnasium's five values, the observation as text."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of an episode and the named parts it is made of."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What scoring may read of the agent's work: the main line's messages and its last text."""

    messages: tuple[Message, ...]
    final_text: str
    turns: int


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Edge(StrEnum):
    """How a turn hangs in the tree."""

    ROOT = "root"
    EXTEND = "extend"
    RETRY = "retry"
    BRANCH = "branch"
    SUBAGENT = "subagent"
    COMPACTION_REQUEST = "compaction_request"
    COMPACTED = "compacted"
    SIDE = "side"


LINES = {Edge.SUBAGENT: "subagent", Edge.COMPACTION_REQUEST: "compaction", Edge.SIDE: "side"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Experts that a mixture-of-experts model chose for `tokens` consecutive tokens.

    `data` is base64 of little-endian unsigned integers of `width` bytes, C order (tokens, layers, top_k); the largest
    value of that width means "not recorded".
    """

    tokens: int
    layers: int
    top_k: int
    width: Literal[1, 2, 4]
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation: a node of the tree.

    `prompt_ids` are the tokens between the parent's last output token and this turn's first
    (the whole prompt for a root). `output_ids`, `logprobs` and `versions` have equal length;
    a logprob is None where the engine could not give one, and such a token is never trained. `edge` says how
    the turn came to be; a root that belongs to an earlier turn (a sub-agent to the call that started it, a fresh
    start to its summary) names it in `origin`. `note` says why a turn is not trainable. `asked` is what the client
    wished of sampling; the recipe decides. `wire` is what the client said of itself (agent, thread, window).
    `routing` covers the parent's last output token, `prompt_ids` and `output_ids` but the last: what the model read.
    """

    id: int
    parent: int | None
    edge: Edge
    messages: tuple[Message, ...]
    message: Message
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    versions: tuple[WeightVersion, ...]
    finish: Finish
    trainable: bool = True
    note: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    origin: int | None = None
    wire: dict[str, str] = field(default_factory=dict)
    routing: Routing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All turns of one episode; a turn's id is its index, parents come before children."""

    turns: tuple[Turn, ...] = ()

    def path(self, turn_id: int) -> tuple[Turn, ...]:
        """Turns from the root to `turn_id`."""
        chain: list[Turn] = []
        at: int | None = turn_id
        while at is not None:
            chain.append(self.turns[at])
            at = self.turns[at].parent
        return tuple(reversed(chain))

    def leaves(self) -> tuple[Turn, ...]:
        """Turns that no other turn continues, in order of creation."""
        parents = {turn.parent for turn in self.turns}
        return tuple(turn for turn in self.turns if turn.id not in parents)

    def line(self, turn_id: int) -> str:
        """Which conversation a turn belongs to: main, subagent, compaction or side."""
        at: int | None = turn_id
        while at is not None:
            turn = self.turns[at]
            if turn.edge in LINES:
                return LINES[turn.edge]
            if turn.edge is Edge.COMPACTED and turn.origin is not None:
                turn = self.turns[turn.origin]  # goes on in the place of what was summarised
            at = turn.parent if turn.parent is not None else turn.origin
        return "main"

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> WeightVersion | None:
        """The oldest weights that sampled any token; None for a tree without tokens."""
        return min((min(turn.versions) for turn in self.turns if turn.versions), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The episode was judged."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    kind: Literal["scored"] = "scored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted:
    """The policy's own fault (crash of its agent, timeout, overflow): trained with reward 0."""

    reason: str
    detail: str = ""
    kind: Literal["faulted"] = "faulted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """Infrastructure failed. Never trained, counted by reason."""

    reason: str
    detail: str = ""
    kind: Literal["discarded"] = "discarded"


Outcome = Annotated[Scored | Faulted | Discarded, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt at a Task. `timings` holds seconds per phase (sandbox, reset, agent, score, total); `log` is the
    agent's own lines, cut to a bound. `seats` are the other players' trajectories of the same game."""

    id: str
    task_id: str
    group_id: str
    index: int
    attempt: int
    split: str
    tree: Tree
    outcome: Outcome
    timings: dict[str, float] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    seats: tuple["Episode", ...] = ()

    @property
    def reward(self) -> float | None:
        """The number that training uses; None when the episode must not be trained."""
        if isinstance(self.outcome, Discarded):
            return None
        return self.outcome.reward if isinstance(self.outcome, Scored) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sibling episodes of one Task: the baseline's unit. `seq` is the task's place in the data order."""

    id: str
    seq: int
    task_id: str
    episodes: tuple[Episode, ...]

    @property
    def without_difference(self) -> bool:
        """Whether all rewards are equal but for rounding: such a group teaches nothing."""
        return alike([episode.reward for episode in self.episodes if episode.reward is not None])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What an engine is asked. `session` is the affinity key; `max_tokens` counts new tokens.

    `prompt_ids` is any sequence of ints, often an `array`. An engine that records routing answers with the experts of
    every token that the model reads from place `routing_from` on.
    """

    id: str
    session: str
    prompt_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    routing_from: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What an engine answers: three lists of equal length, the stop token included."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    versions: tuple[WeightVersion, ...]
    finish: Finish
    cached_tokens: int = 0
    routing: Routing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastPlan:
    """Weights that come over a process group: where it meets, who is in it (the sender and `world` - 1 receivers), and
    every tensor's name, type (torch's name for it) and shape, in the order they come. `offset` is the rank of the first
    process that reads this plan."""

    group: str
    address: str
    port: int
    world: int
    backend: Literal["gloo", "nccl"]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offset: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Published weights: a directory of safetensors with HF names, or the tensors themselves.

    `deltas` lead from the directory's version to this one, oldest first (`miles.deltas`). With `adapter` set, the
    directory or the tensors hold only a low-rank adapter of that name, in peft's format, over the first weights. With
    `broadcast` set they are being sent while the sink loads.
    """

    version: WeightVersion
    directory: Path | None = None
    tensors: Mapping[str, Any] | None = None
    deltas: tuple[Path, ...] = ()
    adapter: str | None = None
    broadcast: BroadcastPlan | None = None


def alike(values: Sequence[float]) -> bool:
    """Whether numbers are equal but for rounding; none are. One rule for what drops groups and what trains on them."""
    return not values or max(values) - min(values) <= 1e-6 * max(1.0, abs(math.fsum(values) / len(values)))


class Env(Protocol):
    """The rules and the reward of one Task. Made anew for every episode."""

    async def reset(self) -> Observation: ...
    async def step(self, action: str) -> Step:
        """One action: the text given to `act`, or {"name", "arguments"} as JSON for any other tool that was offered."""
        ...

    async def score(self, transcript: Transcript) -> Score: ...
    async def close(self) -> None: ...


class GroupSource(Protocol):
    """Where the trainer takes groups from; rollout implements it."""

    async def take(self, n: int) -> list[Group]:
        """Wait for `n` finished groups, oldest admission first; each group is given out once."""
        ...

    def trained(self) -> None:
        """Tell that what `take` gave last has been trained on: a resumed run must not see it again."""
        ...

    def advance(self, version: WeightVersion) -> None:
        """Tell that engines now serve `version`: admission may go on."""
        ...

    def counters(self) -> dict[str, float]:
        """Numbers for the step's metrics: outcomes by reason, episodes in flight, tokens."""
        ...

    def state(self) -> dict[str, Any]:
        """The data cursor: what to hand to the same source to go on without loss or repeat.

        JSON-able, but for `groups`, if there: a list of Group whose episodes are not to be run again.
        """
        ...


class WeightSink(Protocol):
    """Where the trainer publishes to; rollout implements it."""

    async def load(self, weights: Weights) -> float:
        """Return once every engine confirmed that it serves `weights.version`: seconds that sampling stood still."""
        ...


class Evaluator(Protocol):
    """Measures the served policy on held-out tasks."""

    async def evaluate(self, version: WeightVersion) -> dict[str, Any]: ...


class Reporter(Protocol):
    """Receives what a person may want to see while the run goes on. Must not block."""

    def event(self, kind: str, data: Mapping[str, Any]) -> None: ...


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(cls: Any) -> TypeAdapter[Any]:
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def to_json(value: Any) -> bytes:
    """One value of this module as compact JSON. Text that UTF-8 cannot hold is replaced, not refused."""
    adapter = _adapter(type(value))
    try:
        return adapter.dump_json(value)
    except ValueError:
        return adapter.dump_json(adapter.validate_python(_utf8(adapter.dump_python(value))))


def from_json(cls: type[T], data: bytes | str) -> T:
    """The inverse of `to_json`; raises pydantic's ValidationError naming the field that is wrong."""
    value: T = _adapter(cls).validate_json(data)
    return value


def _utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_utf8(k): _utf8(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_utf8(v) for v in value]
    return value

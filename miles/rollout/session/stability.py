"""How much of a harness's prompts is new in every turn, and why: what it rewrites is sampled after again.

A conversation that only grows extends its parent's exact ids. One that changes what was said before branches: its
prompt is rendered, prefilled and trained anew from there on.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from miles.rollout.rendering.text import text_of
from miles.rollout.session.matching import calls_of
from miles.types import Edge, Message, Tree, Turn

__all__ = ["Stability", "shared_beginning", "stability"]

_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """Of one tree's main line and sub-agents; side calls and summaries begin anew by their nature."""

    turns: int
    extended: int
    prompt_tokens: int
    """Of all prompts together."""
    new_tokens: int
    """Of those, tokens that no turn before had in their place."""
    causes: dict[str, int] = field(default_factory=dict)
    """Why turns did not extend: cause -> how many."""

    @property
    def reused(self) -> float:
        """Share of the prompts that was there already."""
        return 1 - self.new_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def stability(trees: Sequence[Tree]) -> Stability:
    """Add up what the trees of some episodes say."""
    causes: Counter[str] = Counter()
    turns = extended = prompts = new = 0
    for tree in trees:
        lengths: dict[int, int] = {}
        for turn in tree.turns:
            before = lengths.get(turn.parent, 0) if turn.parent is not None else 0
            prompts, new = prompts + before + len(turn.prompt_ids), new + len(turn.prompt_ids)
            lengths[turn.id] = before + len(turn.prompt_ids) + len(turn.output_ids)
            if tree.line(turn.id) in ("side", "compaction"):
                continue
            turns += 1
            extended += turn.edge is Edge.EXTEND
            if turn.edge in (Edge.BRANCH, Edge.RETRY):
                causes[_cause(tree, turn)] += 1
    return Stability(turns=turns, extended=extended, prompt_tokens=prompts, new_tokens=new, causes=dict(causes))


def shared_beginning(one: Tree, other: Tree, decode: Callable[[Sequence[int]], str]) -> tuple[float, str]:
    """(Share of the first prompt that two episodes of one task have in common, where they part): what a group prefills
    and trains once."""
    first, second = one.turns[0].prompt_ids, other.turns[0].prompt_ids
    pairs = enumerate(zip(first, second, strict=False))
    at = next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
    longest = max(len(first), len(second))
    if at == longest:
        return 1.0, ""
    start = max(0, at - _SHOWN)
    return at / longest, f"{decode(first[start : at + _SHOWN])!r} became {decode(second[start : at + _SHOWN])!r}"


def _cause(tree: Tree, turn: Turn) -> str:
    """What this turn says otherwise than the turn before it in its conversation."""
    if turn.edge is Edge.RETRY:
        return "the same request again"
    before = _turn_before(tree, turn)
    if before is None:
        return "a conversation of its own"
    was, now = _said(tree, before), _said(tree, turn)[:-1]
    for place, (old, new) in enumerate(zip(was, now, strict=False)):
        if (told := _difference(old, new)) is not None:
            if new not in was and old in now[place + 1 :]:
                told = f"a {new.get('role')} message was put in"
            return told if old.get("role") == "system" else f"{told} (message {place})"
    if len(now) < len(was):
        return f"the last {len(was) - len(now)} messages were dropped"
    return "the tools changed" if turn.parent is None else "the template cannot extend this answer"


def _turn_before(tree: Tree, turn: Turn) -> Turn | None:
    """The newest turn of the same conversation: one with the same beginning, where the turn has one; else one of the
    same line, asked by the same agent."""
    root = tree.path(turn.id)[0].id
    line, agent = tree.line(turn.id), turn.wire.get("agent")
    for earlier in reversed(tree.turns[: turn.id]):
        if turn.parent is not None and tree.path(earlier.id)[0].id == root:
            return earlier
        if turn.parent is None and tree.line(earlier.id) == line and earlier.wire.get("agent") == agent:
            return earlier
    return None


def _said(tree: Tree, turn: Turn) -> list[Message]:
    return [message for above in tree.path(turn.id) for message in (*above.messages, above.message)]


def _difference(old: Message, new: Message) -> str | None:
    role = str(old.get("role"))
    if role != new.get("role"):
        return f"{new.get('role')} stands where {role} stood"
    if calls_of(old) != calls_of(new):
        return "tool calls were rewritten"
    before, after = text_of(old.get("content")), text_of(new.get("content"))
    if before == after:
        thought, kept = (message.get("reasoning_content") or "" for message in (old, new))
        return None if thought == kept else "reasoning was left out" if not kept else "reasoning was rewritten"
    at = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    start = max(0, at - _SHOWN // 2)
    return f"{role} text changed: {before[start : at + _SHOWN]!r} became {after[start : at + _SHOWN]!r}"

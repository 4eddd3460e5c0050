"""The trajectory format: one JSON object a line, one tree each. `docs/trajectory-format.md` describes the fields.

with open_trajectories("trajectories.jsonl") as trajectories:
    for trajectory in trajectories:
        for row in trajectory.rows(): ...
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles.errors import ConfigError
from miles.types import Edge, Episode, Tree, Turn, from_json, to_json

__all__ = ["FORMAT", "Trajectory", "open_trajectories"]

FORMAT = "miles-trajectory-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One recorded session. `reward` is None when it was not scored; `meta` is whatever the recorder knew."""

    id: str
    tree: Tree
    reward: float | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_episode(cls, episode: Episode) -> "Trajectory":
        """What an episode leaves: its tree, its reward, and where it belongs."""
        outcome = episode.outcome
        why = {"reason": outcome.reason} if outcome.kind != "scored" else {}
        meta = {
            "task": episode.task_id,
            "group": episode.group_id,
            "split": episode.split,
            "outcome": outcome.kind,
            **why,
        }
        return cls(id=episode.id, tree=episode.tree, reward=episode.reward, meta=meta)

    def to_line(self) -> str:
        """The trajectory as one line of JSON, without the line end."""
        turns = json.loads(to_json(self.tree))["turns"]
        line = {"format": FORMAT, "id": self.id, "reward": self.reward, "meta": self.meta, "turns": turns}
        return json.dumps(line, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> "Trajectory":
        """The inverse of `to_line`; ConfigError for anything else."""
        try:
            data = json.loads(line)
            if data["format"] != FORMAT:
                raise ConfigError(f"trajectory format {data['format']!r}; this reader knows {FORMAT!r}")
            tree = from_json(Tree, json.dumps({"turns": data["turns"]}))
            return cls(id=data["id"], tree=tree, reward=data["reward"], meta=data["meta"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"this line is no trajectory: {type(error).__name__}: {str(error)[:200]}") from error

    def paths(self) -> Iterator[tuple[list[int], list[bool], list[float | None]]]:
        """For each leaf: (ids, which of them to train, logprob or None of each).

        A sampled token is to be trained once: a turn that several leaves share counts for the first of them, and a
        token without a logprob for none.
        """
        owner: dict[int, int] = {}
        for leaf in self.tree.leaves():
            ids: list[int] = []
            mask: list[bool] = []
            logprobs: list[float | None] = []
            for turn in self.tree.path(leaf.id):
                own = turn.trainable and owner.setdefault(turn.id, leaf.id) == leaf.id
                ids += [*turn.prompt_ids, *turn.output_ids]
                mask += [False] * len(turn.prompt_ids) + [own and value is not None for value in turn.logprobs]
                logprobs += [None] * len(turn.prompt_ids) + [*turn.logprobs]
            yield ids, mask, logprobs

    def outline(self) -> str:
        """The tree as indented text: one line a turn; a turn that merely goes on is not indented further."""
        below: dict[int | None, list[int]] = {}
        for turn in self.tree.turns:
            below.setdefault(turn.parent if turn.parent is not None else turn.origin, []).append(turn.id)
        lines, open_turns = [], [(turn, 0) for turn in reversed(below.get(None, []))]
        while open_turns:
            at, depth = open_turns.pop()
            turn = self.tree.turns[at]
            lines.append("  " * depth + _describe(turn))
            for child in sorted(below.get(at, []), key=self._goes_on, reverse=True):
                open_turns.append((child, depth + (not self._goes_on(child))))
        return "\n".join(lines)

    def _goes_on(self, turn: int) -> bool:
        return self.tree.turns[turn].edge is Edge.EXTEND


def _describe(turn: Turn) -> str:
    said = str(turn.message.get("content") or "")
    calls = ", ".join(call["function"]["name"] for call in turn.message.get("tool_calls") or ())
    words = f"{said[:40]!r}" + (f" calls {calls}" if calls else "")
    trained = turn.note or f"{len(turn.output_ids)} trained"
    return f"{turn.id} {turn.edge}: {len(turn.prompt_ids)} new prompt tokens, {trained}: {words}"


@contextlib.contextmanager
def open_trajectories(path: Path | str) -> Iterator[Iterator[Trajectory]]:
    """Read a file line by line; ConfigError names the line that is wrong."""
    with Path(path).open() as lines:
        yield _read(path, lines)


def _read(path: Path | str, lines: Iterator[str]) -> Iterator[Trajectory]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield Trajectory.from_line(line)
            except (ConfigError, ValidationError) as error:
                raise ConfigError(f"{path}:{number}: {error}") from error

"""One generation as it grows, over weight updates and over servers that die, and how a server's reply is read."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.errors import EngineError
from miles.rollout.engines.base import OnTokens
from miles.rollout.engines.sglang.facts import version_of
from miles.routing import encode_routing
from miles.types import Finish, Generated, GenerateRequest, WeightVersion

__all__ = ["Piece", "Sampling", "read_reply"]

Experts = NDArray[np.int32]
"""(tokens, layers, k)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one request to a server brought."""

    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    versions: tuple[WeightVersion, ...] = ()
    finish: Finish = Finish.ABORT
    cached_tokens: int = 0
    experts: Experts | None = None


class Sampling:
    """Pieces of one generation. It goes on after what was sampled so far until a piece ends by itself."""

    def __init__(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> None:
        self.request, self.on_tokens = request, on_tokens
        self.finish: Finish | None = None
        self.pieces = 0
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._versions: list[WeightVersion] = []
        self._cached = 0
        self._experts: list[Experts] = []

    @property
    def prompt(self) -> list[int]:
        """What the next piece is sampled after."""
        return [*self.request.prompt_ids, *self._ids]

    @property
    def length(self) -> int:
        """Tokens of `prompt`."""
        return len(self.request.prompt_ids) + len(self._ids)

    @property
    def left(self) -> int:
        """New tokens that the next piece may have."""
        return self.request.max_tokens - len(self._ids)

    @property
    def routing_from(self) -> int:
        """First place whose experts are not recorded yet."""
        return self.request.routing_from + sum(len(part) for part in self._experts)

    def told(self, ids: Sequence[int]) -> None:
        """The ids so far of the piece under way."""
        if self.on_tokens is not None:
            self.on_tokens((*self._ids, *ids))

    def add(self, piece: Piece, *, interrupted: bool = False) -> None:
        """Take a piece. An interrupted one is gone on with, unless it used up what was left."""
        before = self.length
        if self.pieces == 0:
            self._cached = piece.cached_tokens
        if piece.experts is not None and len(piece.experts):
            self._add_experts(piece.experts, before)
        self.pieces += 1
        self._ids += piece.output_ids
        self._logprobs += piece.logprobs
        self._versions += piece.versions
        if not interrupted:
            self.finish = piece.finish
        elif self.left <= 0:
            self.finish = Finish.LENGTH

    def _add_experts(self, experts: Experts, before: int) -> None:
        """Tokens of earlier pieces that nobody recorded were read again by other weights: not what sampled them."""
        start = self.routing_from
        unknown = slice(max(0, len(self.request.prompt_ids) - start), max(0, before - 1 - start))
        if unknown.start < unknown.stop:
            experts = experts.copy()
            experts[unknown] = -1
        self._experts.append(experts)

    def generated(self) -> Generated:
        """The whole, when `finish` is set."""
        assert self.finish is not None
        return Generated(
            output_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            finish=self.finish,
            cached_tokens=self._cached,
            routing=encode_routing(np.concatenate(self._experts)) if self._experts else None,
        )


def read_reply(
    reply: Mapping[str, Any], began: WeightVersion, *, shape: tuple[int, int] | None = None
) -> tuple[Piece, str | None]:
    """A reply of `/generate` as a piece, and the version that the server names; EngineError when it contradicts itself.

    `began` is the version of tokens for which the server names none. `shape`: (layers, k) of recorded routing.
    """
    meta = reply["meta_info"]
    ids, pairs = reply.get("output_ids") or [], meta.get("output_token_logprobs") or []
    total = meta.get("completion_tokens")
    if len(ids) != len(pairs) or (total is not None and total != len(ids)):
        raise EngineError(
            f"SGLang returned {len(ids)} ids and {len(pairs)} logprobs for {total} completion tokens; "
            "the turn is refused"
        )
    if [pair[1] for pair in pairs] != list(ids):
        raise EngineError("SGLang returned logprobs of other tokens than it sampled; the turn is refused")
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort" and int(reason.get("status_code") or 0) == 400:
        raise EngineError(f"SGLang refused the request: {reason.get('message')}")
    piece = Piece(
        output_ids=tuple(ids),
        logprobs=tuple(None if pair[0] is None else float(pair[0]) for pair in pairs),
        versions=_versions(meta, len(ids), began),
        finish={"stop": Finish.STOP, "length": Finish.LENGTH}.get(str(reason.get("type")), Finish.ABORT),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        experts=_experts(meta.get("routed_experts"), shape) if shape else None,
    )
    return piece, meta.get("weight_version")


def _versions(meta: Mapping[str, Any], count: int, began: WeightVersion) -> tuple[WeightVersion, ...]:
    spans: Sequence[dict[str, Any]] = meta.get("weight_versions") or ()
    versions = [began] * count
    for span in spans:
        for place in range(max(0, int(span["start"])), min(count, int(span["end"]))):
            versions[place] = version_of(span["version"])
    return tuple(versions)


def _experts(told: Any, shape: tuple[int, int]) -> Experts | None:
    if told is None:
        return None
    raw = np.frombuffer(base64.b64decode(told), dtype="<i4")
    if raw.size % (shape[0] * shape[1]):
        raise EngineError(
            f"SGLang recorded {raw.size} experts, no multiple of {shape[0]} layers x {shape[1]}: is it another model?"
        )
    return raw.reshape(-1, *shape)

"""An engine that plays given replies as exact ids: for tests, benchmarks and harness development."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from miles.errors import EngineError
from miles.rollout.engines.base import OnTokens
from miles.types import Finish, Generated, GenerateRequest, Weights, WeightVersion

__all__ = ["Reply", "ScriptedEngine", "scripted_logprobs"]

Reply = str | Sequence[int] | Generated | Exception
Script = Sequence[Reply] | Callable[[GenerateRequest], Reply | Awaitable[Reply]]


def scripted_logprobs(count: int) -> tuple[float, ...]:
    """What the scripted engine says of `count` tokens: -1/(1+position), so that any two positions differ."""
    return tuple(-1.0 / (1 + place) for place in range(count))


class ScriptedEngine:
    """Answers the n-th request of each session with the n-th entry of `script`.

    A text is encoded once with `encode` (control tokens included) and closed with `stop_token`; ids
    are played as they are; an exception is raised. A callable script sees the request. The logprob of
    every token is -1/(1+position), so that a test can tell any two positions apart. `requests` keeps
    what was asked.
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], list[int]] | None = None,
        stop_token: int | None = None,
        latency_s: float = 0.0,
        context_length: int = 1 << 20,
    ) -> None:
        self._script, self._encode, self._stop_token = script, encode, stop_token
        self._latency_s, self._context_length = latency_s, context_length
        self._turn: dict[str, int] = {}
        self._version = 0
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def context_length(self) -> int:
        return self._context_length

    async def start(self) -> None:
        return None

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Generated:
        self.requests.append(request)
        version = self._version
        try:
            reply = await self._next(request)
            if self._latency_s:
                await asyncio.sleep(self._latency_s)
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            raise
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Generated):
            await _tell(reply.output_ids, on_tokens)
            return reply
        ids = self._ids(reply)
        finish = Finish.STOP if len(ids) <= request.max_tokens else Finish.LENGTH
        ids = ids[: request.max_tokens]
        await _tell(ids, on_tokens)
        logprobs = scripted_logprobs(len(ids))
        return Generated(output_ids=tuple(ids), logprobs=logprobs, versions=(version,) * len(ids), finish=finish)

    async def _next(self, request: GenerateRequest) -> Reply:
        if callable(self._script):
            reply = self._script(request)
            return await reply if isinstance(reply, Awaitable) else reply
        turn = self._turn.get(request.session, 0)
        self._turn[request.session] = turn + 1
        if turn >= len(self._script):
            raise EngineError(
                f"the script has {len(self._script)} replies; session {request.session} asked for one more"
            )
        return self._script[turn]

    def _ids(self, reply: str | Sequence[int]) -> list[int]:
        if not isinstance(reply, str):
            return list(reply)
        if self._encode is None:
            raise EngineError("a scripted text needs encode=; give token ids instead")
        ids = self._encode(reply)
        return [*ids, self._stop_token] if self._stop_token is not None else ids

    async def load(self, weights: Weights) -> float:
        self._version = weights.version
        return 0.0

    def release(self, session: str) -> None:
        """Nothing is kept for sessions here."""

    async def close(self) -> None:
        return None


async def _tell(ids: Sequence[int], on_tokens: OnTokens | None) -> None:
    if on_tokens is not None:
        for end in range(1, len(ids) + 1):
            on_tokens(tuple(ids[:end]))
            await asyncio.sleep(0)

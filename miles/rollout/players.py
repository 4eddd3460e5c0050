"""Games of several players: every player is the policy, with a session and a trajectory of its own (generation layer).

The environment says whose turn it is: `player` in what reset tells, `info["player"]` after a step. What a player has
not seen yet is told when it is asked. Rewards are the parts `player/0`, `player/1`, … of the score. The first player
is the episode, the others are its `seats`."""

import contextlib
from dataclasses import replace

from miles.errors import ContextOverflow, EnvError, SessionError
from miles.rollout.episode import GenerateContext
from miles.rollout.session.session import ChatRequest, Session
from miles.types import Env, Episode, Faulted, Message, Outcome, Score, Scored, Transcript

__all__ = ["play"]

_NOTHING = Transcript(messages=(), final_text="", turns=0)


async def play(context: GenerateContext) -> Episode:
    """One game. A player that cannot answer (its context or its turns are used up) faults, and the game ends."""
    players = int(context.task.data["players"])
    async with contextlib.AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(context.sandbox())
        env = context.taskset.env(context.task, sandbox)
        stack.push_async_callback(env.close)
        sessions = [await stack.enter_async_context(context.session()) for _ in range(players)]
        limit_s = context.agent_limit_s()
        try:
            faults = await context.phase("agent", _game(context, env, sessions), limit_s)
            score = await context.phase("score", env.score(_NOTHING), context.score_limit_s())
        except TimeoutError:
            busy = any(session.waiting_for_engine for session in sessions)
            return context.discarded("engine_slow" if busy else "game_timeout", f"{limit_s:g} s for the game")
        trees = [await session.close() for session in sessions]
    outcomes = [_outcome(player, score, faults) for player in range(players)]
    seats = [context.episode(tree, outcome) for tree, outcome in zip(trees, outcomes, strict=True)]
    own = [replace(seat, id=f"{seat.id}/p{player}") if player else seat for player, seat in enumerate(seats)]
    context.finished = replace(own[0], seats=tuple(own[1:]))
    return context.finished


async def _game(context: GenerateContext, env: Env, sessions: list[Session]) -> dict[int, Faulted]:
    """Play to the end; who could not go on, and why."""
    observation = await env.reset()
    player = getattr(env, "player", 0)
    told: list[list[Message]] = [[] for _ in sessions]
    told[player].extend(observation.messages)
    while True:
        try:
            done = await sessions[player].complete(ChatRequest(messages=tuple(told[player])))
        except (SessionError, ContextOverflow) as error:
            reason = getattr(error, "code", "context_length_exceeded")
            return {player: Faulted(reason=reason, detail=str(error))}
        done.delivered()
        answer = done.message
        told[player].append({name: value for name, value in answer.items() if value is not None})
        step = await env.step(str(answer.get("content") or ""))
        if step.terminated or step.truncated:
            return {}
        player = step.info.get("player", player)
        if not isinstance(player, int) or not 0 <= player < len(sessions):
            raise EnvError(f"the environment says that it is the turn of player {player!r} of {len(sessions)}")
        told[player].append({"role": "user", "content": step.observation})


def _outcome(player: int, score: Score, faults: dict[int, Faulted]) -> Outcome:
    if player in faults:
        return faults[player]
    own = score.parts.get(f"player/{player}", 0.0)
    return Scored(reward=own, parts={"steps": score.parts.get("steps", 0.0)})

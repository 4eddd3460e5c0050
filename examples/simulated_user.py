"""An agent that must ask: its user is another model, with a wish that the agent does not know (generation layer).

    miles launch tiny env.name=examples.simulated_user:Bookings generation=examples.simulated_user:generate \\
        'session.models={user="untrained"}'

The user speaks through a session of its own, under the model name `user`; the map says who answers to that name: the
policy without being trained, or another engine. To the agent, what the user says is prompt: only the agent is trained.
"""

import random
from collections.abc import Iterator, Sequence

from miles.envs.base import BaseEnv, Demonstration, Taskset
from miles.errors import ContextOverflow, SessionError
from miles.rollout.episode import AgentGenerate, GenerateContext
from miles.rollout.session.session import ChatRequest, Session
from miles.types import Env, Episode, Faulted, Message, Outcome, Score, Task, Transcript

__all__ = ["Bookings", "generate"]

CITIES = ("Lisbon", "Oslo", "Quito", "Turin")
RULES = (
    "You book trips. Ask your user what you need to know, one question at a time. To book, answer BOOK: CITY, DAYS days"
)
PERSONA = (
    "You want to go to {city} for {days} days. Answer only what you are asked, in one short sentence. Never say BOOK."
)


class Booking(BaseEnv):
    """Half for the city, half for the days."""

    async def score(self, transcript: Transcript) -> Score:
        _, _, booked = transcript.final_text.partition("BOOK:")
        city, days = str(self.task.data["city"]) in booked, f"{self.task.data['days']} days" in booked
        return Score(reward=0.5 * city + 0.5 * days, parts={"city": float(city), "days": float(days)})


class Bookings(Taskset):
    """Four cities, two to five days."""

    name, reward_range = "bookings", (0.0, 1.0)

    def tasks(self, split: str) -> Sequence[Task]:
        days = (2, 3, 4) if split == "train" else (5,)
        prompt: tuple[Message, ...] = (
            {"role": "system", "content": RULES},
            {"role": "user", "content": "I want to book a trip."},
        )
        wishes = [{"city": city, "days": n} for city in CITIES for n in days]
        return [Task(id=f"{w['city']}-{w['days']}", split=split, prompt=prompt, data=w) for w in wishes]

    def env(self, task: Task, sandbox: object) -> Env:
        return Booking(task)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Asks both questions; every other one books what nobody said."""
        dice, tasks = random.Random(seed), self.tasks("train")
        while True:
            task = dice.choice(tasks)
            wish = task.data if dice.random() < 0.5 else dice.choice(tasks).data
            told: list[Message] = [
                *task.prompt,
                {"role": "assistant", "content": "Where to?"},
                {"role": "user", "content": f"To {task.data['city']}."},
                {"role": "assistant", "content": "For how long?"},
                {"role": "user", "content": f"For {task.data['days']} days."},
                {"role": "assistant", "content": f"BOOK: {wish['city']}, {wish['days']} days"},
            ]
            yield tuple(told), ()


async def generate(context: GenerateContext) -> Episode:
    """Agent and user speak in turn until the agent books, or one of them can say nothing more."""
    env = context.taskset.env(context.task, None)
    async with context.session() as agent, context.session() as user:
        try:
            fault = await context.phase("agent", _talk(context, agent, user), context.agent_limit_s())
        except TimeoutError:
            if agent.waiting_for_engine or user.waiting_for_engine:
                return context.discarded("engine_slow", "the deadline passed while a model call was being answered")
            fault = Faulted(reason="agent_timeout")
        outcome: Outcome = await AgentGenerate.judge(context, env, agent.transcript(), fault)
        return context.episode(await agent.close(), outcome)


async def _talk(context: GenerateContext, agent: Session, user: Session) -> Faulted | None:
    told = list(context.task.prompt)
    persona: list[Message] = [{"role": "system", "content": PERSONA.format(**context.task.data)}]
    while True:
        try:
            said = await _say(agent, told, "policy")
        except (SessionError, ContextOverflow) as error:
            return Faulted(reason=getattr(error, "code", "context_length_exceeded"), detail=str(error))
        if "BOOK:" in said:
            return None
        persona.append({"role": "user", "content": said})
        told.append({"role": "user", "content": await _say(user, persona, "user")})


async def _say(session: Session, messages: list[Message], model: str) -> str:
    """What the model answers; it is added to its own side of the conversation."""
    done = await session.complete(ChatRequest(messages=tuple(messages), model=model))
    done.delivered()
    messages.append({name: value for name, value in done.message.items() if value is not None})
    return str(done.message.get("content") or "")

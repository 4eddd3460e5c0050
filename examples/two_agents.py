"""Two agents, one task: a planner that sees only the task, and a worker that has the sandbox (generation layer).

    miles launch swe-mini --smoke generation=examples.two_agents:generate

Each has a harness and a session of its own. Both are trained: the planner is the episode, the worker its seat, and both
get what the environment scores at the end.
"""

from dataclasses import replace

from miles.recipes.agents import make_harness
from miles.rollout.episode import AgentGenerate, GenerateContext
from miles.types import Env, Episode, Faulted, Message, Observation, Tree

__all__ = ["Pair", "generate"]

PLAN = "You plan, somebody else works. Say in a few short steps how to solve the task; you have no tools."


class Pair:
    """A planner's and a worker's harness, by name, as one generation layer."""

    def __init__(self, planner: str, worker: str) -> None:
        self.planner = AgentGenerate(make_harness(planner, {}))
        self.worker = AgentGenerate(make_harness(worker, {}))
        self.makes_machines = self.worker.makes_machines

    async def __call__(self, context: GenerateContext) -> Episode:
        worker = self.worker
        async with context.sandbox(worker.harness) as sandbox:
            env = context.env(sandbox)
            try:
                observation = await worker.reset(context, env)
                tree, plan, fault = await self._plan(context, env, observation)
                if fault is not None:
                    return context.episode(tree, fault)
                told: Message = {"role": "user", "content": f"A plan for it:\n{plan}"}
                briefed = replace(observation, messages=(*observation.messages, told))
                async with context.session(worker.harness) as session:
                    fault = await worker.act(context, env, briefed, sandbox, session)
                    transcript, work = session.transcript(), await session.close()
                if sandbox is not None:
                    await sandbox.quiesce()
                outcome = await worker.judge(context, env, transcript, fault)
            finally:
                await env.close()
        seat = replace(context.episode(work, outcome), id=f"{context.job.episode_id}/worker")
        context.finished = replace(context.episode(tree, outcome), seats=(seat,))
        return context.finished

    async def _plan(
        self, context: GenerateContext, env: Env, observation: Observation
    ) -> tuple[Tree, str, Faulted | None]:
        """(The planner's turns, what it said, its fault.)"""
        brief: Message = {"role": "system", "content": PLAN}
        alone = Observation(messages=(brief, *observation.messages))
        async with context.session(self.planner.harness) as session:
            fault = await self.planner.act(context, env, alone, None, session)
            return await session.close(), session.transcript().final_text, fault

    async def close(self) -> None:
        """Of both harnesses; the run calls it at its end."""
        await self.planner.harness.close()
        await self.worker.harness.close()


generate = Pair("react", "mini-swe-agent")

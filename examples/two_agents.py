"""Two agents, one task: a planner that sees only the task, and a worker that has the sandbox (generation layer).

    miles launch swe-mini generation=examples.two_agents:generate

Each has a harness and a session of its own. Both are trained: the planner is the episode, the worker its seat, and both
get what the environment scores at the end.
"""

from dataclasses import replace

from miles.recipes.agents import make_harness
from miles.rollout.episode import AgentGenerate, Generate, GenerateContext
from miles.types import Episode, Message, Observation

__all__ = ["generate", "pair"]

PLAN = "You plan, somebody else works. Say in a few short steps how to solve the task; you have no tools."


def pair(planner: str, worker: str) -> Generate:
    """A planner's and a worker's harness, by name, as one generation layer."""
    plans, works = AgentGenerate(make_harness(planner, {})), AgentGenerate(make_harness(worker, {}))

    async def generate(context: GenerateContext) -> Episode:
        async with context.sandbox(works.harness) as sandbox:
            env = context.taskset.env(context.task, sandbox)
            try:
                observation = await works.reset(context, env)
                brief: Message = {"role": "system", "content": PLAN}
                alone = Observation(messages=(brief, *observation.messages))
                async with context.session(plans.harness) as first:
                    fault = await plans.act(context, env, alone, None, first)
                    plan: Message = {"role": "user", "content": f"A plan for it:\n{first.transcript().final_text}"}
                    tree = await first.close()
                if fault is not None:
                    return context.episode(tree, fault)
                briefed = replace(observation, messages=(*observation.messages, plan))
                async with context.session(works.harness) as second:
                    fault = await works.act(context, env, briefed, sandbox, second)
                    transcript, work = second.transcript(), await second.close()
                if sandbox is not None:
                    await sandbox.quiesce()
                outcome = await works.judge(context, env, transcript, fault)
                seat = replace(context.episode(work, outcome), id=f"{context.job.episode_id}/worker")
                context.finished = replace(context.episode(tree, outcome), seats=(seat,))
                return context.finished
            finally:
                await env.close()

    return generate


generate = pair("react", "mini-swe-agent")

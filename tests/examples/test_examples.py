"""The examples of the generation layer, as they stand."""

import pytest

from examples import simulated_user, two_agents
from miles.envs.terminal.taskset import TerminalTaskset
from miles.recipes.scripted import scripted_model
from miles.rollout.episode import EpisodeConfig, EpisodeRunner, Job
from miles.rollout.session.config import SessionConfig
from miles.rollout.session.server import SessionServer
from miles.sandboxes.pool import SandboxConfig, SandboxPool, make_backend
from miles.trainer.data.rows import tree_rows
from miles.types import Faulted, Scored


async def play(taskset, generate, script, task=0, **limits):
    engine, rendering = scripted_model(script)
    config = SandboxConfig()
    pool = SandboxPool(make_backend(config), config)
    session = SessionConfig(models={"user": "untrained"})
    try:
        await pool.start()
        async with SessionServer(engine, rendering, session, max_tokens=4096) as server:
            runner = EpisodeRunner(taskset, server, pool, generate, EpisodeConfig(**limits))
            return await runner.run(Job(task=taskset.tasks("train")[task], group_id="g"))
    finally:
        await pool.close()


USER = ["To Lisbon.", "For 2 days."]


async def test_an_agent_that_asks_its_user_is_rewarded_and_alone_is_trained():
    script = {"You want to go to": USER, "*": ["Where to?", "For how long?", "BOOK: Lisbon, 2 days"]}
    episode = await play(simulated_user.Bookings(), simulated_user.generate, script)
    assert episode.outcome == Scored(reward=1.0, parts={"city": 1.0, "days": 1.0})
    assert [turn.message["content"] for turn in episode.tree.turns] == script["*"]
    assert [turn.messages[-1]["content"] for turn in episode.tree.turns[1:]] == USER
    assert len(tree_rows(episode.tree)) == 1


async def test_an_agent_that_guesses_gets_half_and_one_that_never_books_faults():
    script = {"You want to go to": USER, "*": ["BOOK: Lisbon, 9 days"]}
    assert (await play(simulated_user.Bookings(), simulated_user.generate, script)).outcome.reward == 0.5
    script = {"You want to go to": ["No."], "*": ["Where to?"]}
    episode = await play(simulated_user.Bookings(), simulated_user.generate, script, turns=3)
    assert episode.outcome == Faulted(reason="turn_limit", detail="this episode's 3 model calls are used up")


MEND = "sed -i 's/range(first, last)/range(first, last + 1)/' total.py"
TERMINAL = TerminalTaskset()
PLACE = [task.id for task in TERMINAL.tasks("train")].index("python-sum-range")


async def pair_plays(generate, tool):
    work = {"tool": tool, "arguments": {"command": MEND}}
    script = {"You plan, somebody else works": ["Mend the range."], "*": [work, "Done."]}
    if tool == "bash":
        script["*"][1] = {"tool": tool, "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}
    try:
        episode = await play(TERMINAL, generate, script, PLACE)
    finally:
        await generate.close()
    assert episode.outcome == Scored(reward=1.0, parts={"checks": 1.0}), episode.log
    (worker,) = episode.seats
    assert worker.outcome == episode.outcome
    assert [turn.message["content"] for turn in episode.tree.turns] == ["Mend the range."]
    assert "A plan for it:" in str(worker.tree.turns[0].messages)
    assert len(worker.tree.turns) == 2


async def test_a_planner_and_a_worker_are_two_trajectories_with_one_reward():
    await pair_plays(two_agents.Pair("react", "react"), "shell")


@pytest.mark.harness
async def test_a_planner_and_a_real_program():
    await pair_plays(two_agents.generate, "bash")

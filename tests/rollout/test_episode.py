"""Every way an episode can end, and what it is counted as."""

import asyncio
import contextlib
import math
import sys
import time
from dataclasses import replace

import httpx
import pytest

from miles.envs.base import BaseEnv, Taskset
from miles.errors import EngineLost, EnvError, HarnessError, SandboxLost
from miles.harnesses.base import FunctionHarness, Progress, SessionNeeds
from miles.harnesses.react import ReactConfig, ReactHarness
from miles.rollout.episode import AgentGenerate, EpisodeConfig, EpisodeRunner, Job
from miles.sandboxes.base import SandboxSpec
from miles.sandboxes.local.backend import LocalBackend
from miles.sandboxes.pool import SandboxPool
from miles.types import Discarded, Faulted, Finish, Generated, Limits, Score, Scored, Task
from tests.rollout.session.conftest import engine_of, serve  # noqa: F401  fixtures

USER = {"role": "user", "content": "open amber"}
TASK = Task(id="t", prompt=(USER,))


class Env(BaseEnv):
    async def score(self, transcript):
        return Score(reward=float(transcript.final_text == "answer 42"))


class Tasks(Taskset):
    """One task whose Env is a given class."""

    def __init__(self, env=Env, spec=None, on_agent_failure="fault"):
        self._env, self._spec, self.on_agent_failure = env, spec, on_agent_failure
        self.made = []

    def env(self, task, sandbox):
        self.made.append(self._env(task))
        return self.made[-1]

    def sandbox(self, task):
        return self._spec


def env_with(**methods):
    return type("Env", (Env,), methods)


@pytest.fixture
async def play(serve, engine_of):  # noqa: F811
    """Run one episode of a harness against a script; returns the episode."""

    async def make(agent=None, script=("answer 42",), taskset=None, task=TASK, latency_s=0.0, **limits):
        pool = SandboxPool(LocalBackend())
        harness = ReactHarness(ReactConfig(max_turns=4)) if agent is None else FunctionHarness(agent)
        async with serve(engine_of(list(script), latency_s=latency_s)) as server:
            config = EpisodeConfig(**limits)
            runner = EpisodeRunner(taskset or Tasks(), server, pool, AgentGenerate(harness), config)
            episode = await runner.run(Job(task=task, group_id="g"))
            assert server._sessions == {}
        await harness.close()
        await pool.close()
        assert pool.counters["created"] == pool.counters["destroyed"]
        return episode

    return make


async def ask_once(context):
    from openai import AsyncOpenAI

    endpoint = context.endpoint
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=list(context.observation.messages))


async def test_a_scored_episode_has_its_tree_and_timings(play):
    episode = await play()
    assert episode.outcome == Scored(reward=1.0)
    assert len(episode.tree.turns) == 1
    assert set(episode.timings) == {"reset", "agent", "score", "total"}


async def test_a_real_sandbox_a_real_tool(play):
    call = '<tool_call>\n{"name": "shell", "arguments": {"command": "cat amber"}}\n</tool_call>'
    spec = SandboxSpec(files={"/workspace/amber": b"key 42"})
    episode = await play(script=[call, "answer 42"], taskset=Tasks(spec=spec))
    assert episode.outcome == Scored(reward=1.0)
    assert episode.tree.turns[1].messages[0]["content"] == "key 42"


def raising(error):
    async def method(self, *arguments):
        raise error

    return method


async def hang(self, *arguments):
    await asyncio.sleep(60)


def returning(value):
    async def method(self, *arguments):
        return value

    return method


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (raising(ValueError("boom")), "score_failed"),
        (hang, "score_timeout"),
        (returning(Score(reward=math.nan)), "score_not_finite"),
        (returning(Score(reward=math.inf)), "score_not_finite"),
        (returning("high"), "score_not_finite"),
        (returning(None), "score_not_finite"),
        (raising(SandboxLost("gone")), "sandbox"),
    ],
)
async def test_a_scoring_function_that_fails_never_makes_a_reward(play, score, reason):
    episode = await play(taskset=Tasks(env_with(score=score)), score_s=0.2)
    assert isinstance(episode.outcome, Discarded)
    assert episode.outcome.reason == reason
    assert episode.reward is None
    assert len(episode.tree.turns) == 1


async def test_the_detail_of_a_failed_score_is_its_traceback(play):
    episode = await play(taskset=Tasks(env_with(score=raising(ValueError("boom")))))
    assert "ValueError: boom" in episode.outcome.detail


@pytest.mark.parametrize(("reset", "reason"), [(raising(KeyError("k")), "reset_failed"), (hang, "reset_timeout")])
async def test_an_environment_that_cannot_begin(play, reset, reason):
    episode = await play(taskset=Tasks(env_with(reset=reset)), reset_s=0.2)
    assert (type(episode.outcome), episode.outcome.reason) == (Discarded, reason)


async def exits_at_once(context):
    return None


async def crashes_before_asking(context):
    raise RuntimeError("not installed")


async def asks_and_crashes(context):
    await ask_once(context)
    raise RuntimeError("bug in the agent")


async def never_exits(context):
    await ask_once(context)
    await asyncio.sleep(60)


async def floods(context):
    await ask_once(context)
    for _ in range(100_000):
        context.log("x" * 10_000)


async def gives_up(context):
    await ask_once(context)
    raise HarnessError("too hard", reason="gave_up")


@pytest.mark.parametrize(
    ("agent", "outcome", "reason"),
    [
        (exits_at_once, Discarded, "no_model_call"),
        (crashes_before_asking, Discarded, "no_model_call"),
        (asks_and_crashes, Faulted, "agent_crashed"),
        (never_exits, Faulted, "agent_timeout"),
        (gives_up, Faulted, "gave_up"),
    ],
)
async def test_agents_that_fail(play, agent, outcome, reason):
    episode = await play(agent, agent_s=0.5)
    assert (type(episode.outcome), episode.outcome.reason) == (outcome, reason)


async def test_a_faulted_episode_keeps_its_tokens_and_has_reward_0(play):
    episode = await play(asks_and_crashes)
    assert episode.reward == 0.0
    assert episode.tree.sampled_tokens > 0


async def test_a_flood_of_log_lines_is_bounded_and_harmless(play):
    episode = await play(floods)
    assert episode.outcome == Scored(reward=1.0)
    assert (len(episode.log), len(episode.log[0])) == (200, 2000)


async def will_not_be_cancelled(context):
    await ask_once(context)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3)
            return


async def test_an_agent_that_ignores_its_cancellation_does_not_hold_the_episode(play, monkeypatch, caplog):
    monkeypatch.setattr("miles.rollout.episode._CANCEL_S", 0.1)
    began = time.monotonic()
    episode = await play(will_not_be_cancelled, agent_s=0.3)
    assert episode.outcome.reason == "agent_timeout"
    assert time.monotonic() - began < 2.5
    assert "ignores its cancellation" in caplog.text


async def test_the_taskset_may_have_a_failed_agent_scored_as_it_stands(play):
    episode = await play(asks_and_crashes, taskset=Tasks(on_agent_failure="score"))
    assert episode.outcome == Scored(reward=1.0)


async def loses_its_sandbox(context):
    await ask_once(context)
    raise SandboxLost("died in step 3")


async def meets_an_env_bug(context):
    await ask_once(context)
    raise EnvError("nan reward")


async def swallows_an_engine_failure(context):
    with contextlib.suppress(Exception):
        await ask_once(context)


@pytest.mark.parametrize(("agent", "reason"), [(loses_its_sandbox, "sandbox"), (meets_an_env_bug, "env_step_failed")])
async def test_infrastructure_is_never_the_policys_fault(play, agent, reason):
    episode = await play(agent)
    assert (type(episode.outcome), episode.outcome.reason) == (Discarded, reason)


async def test_an_engine_failure_that_the_agent_hides_is_still_one(play):
    episode = await play(swallows_an_engine_failure, script=[EngineLost("gone")])
    assert (type(episode.outcome), episode.outcome.reason) == (Discarded, "engine")


async def steps(context):
    await ask_once(context)
    await context.env.step("x")


async def test_a_bug_in_the_environments_step_is_not_the_policys(play):
    episode = await play(steps, taskset=Tasks(env_with(step=raising(KeyError("bug")))))
    assert (type(episode.outcome), episode.outcome.reason) == (Discarded, "env_step_failed")
    assert "KeyError: 'bug'" in episode.outcome.detail


async def test_a_step_that_returns_no_step_or_never_returns_is_not_the_policys(play):
    async def five_values(self, action):
        return "seen", 0.0, False, False, {}

    async def hangs(self, action):
        await asyncio.sleep(3600)

    episode = await play(steps, taskset=Tasks(env_with(step=five_values)))
    assert episode.outcome.reason == "env_step_failed"
    assert "returned tuple, and must return a Step" in episode.outcome.detail
    task = Task(id="t", prompt=(USER,), limits=Limits(wall_s=1.0))
    episode = await play(steps, taskset=Tasks(env_with(step=hangs)), task=task)
    assert (type(episode.outcome), episode.outcome.reason) == (Discarded, "env_step_timeout")


async def test_a_tasks_own_deadlines_go_over_the_recipes(play):
    class Hurried(Tasks):
        def seconds(self, task):
            return {"agent": 0.3}

    episode = await play(never_exits, taskset=Hurried())
    assert (episode.outcome.reason, episode.outcome.detail) == ("agent_timeout", "0.3 s")


async def exits(context):
    await ask_once(context)
    sys.exit(0)


async def cancels_itself(context):
    await ask_once(context)
    raise asyncio.CancelledError


async def test_an_agent_cannot_end_the_run_by_exiting_or_cancelling(play):
    for agent in (exits, cancels_itself):
        assert (await play(agent)).outcome.reason == "agent_crashed"
    episode = await play(taskset=Tasks(env_with(score=raising(SystemExit(1)))))
    assert (type(episode.outcome), episode.outcome.reason) == (Discarded, "score_failed")


async def test_scoring_keeps_its_share_of_the_wall_clock(play):
    task = Task(id="t", prompt=(USER,), limits=Limits(wall_s=1.0))
    episode = await play(never_exits, taskset=Tasks(on_agent_failure="score"), task=task)
    assert episode.outcome == Scored(reward=1.0)


@pytest.mark.slow
async def test_a_slow_clean_up_does_not_take_back_a_score(play):
    async def slow(self):
        await asyncio.sleep(6.5)

    task = Task(id="t", prompt=(USER,), limits=Limits(wall_s=1.0))
    episode = await play(taskset=Tasks(env_with(close=slow)), task=task)
    assert episode.outcome == Scored(reward=1.0)


async def test_a_lost_engine_discards_the_episode(play):
    episode = await play(ask_once, script=[EngineLost("gone")])
    assert (episode.outcome.reason, episode.outcome.detail) == ("engine", "EngineLost: gone")


async def test_a_deadline_that_passes_while_the_engine_works_is_not_the_agents(play):
    episode = await play(ask_once, latency_s=30, agent_s=0.3)
    assert (type(episode.outcome), episode.outcome.reason) == (Discarded, "engine_slow")


async def test_a_task_may_bring_its_own_limits(play):
    task = Task(id="t", prompt=(USER,), limits=Limits(turns=1, wall_s=0.5))
    call = '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>'
    episode = await play(script=[call] * 9, task=task)
    assert (type(episode.outcome), episode.outcome.reason) == (Faulted, "turn_limit")
    episode = await play(never_exits, task=task)
    assert episode.outcome.reason == "agent_timeout"


async def test_cancelling_leaves_nothing(play):
    running = asyncio.create_task(play(never_exits, taskset=Tasks(spec=SandboxSpec())))
    await asyncio.sleep(0.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_generation_layer_that_breaks_or_hangs_is_an_outcome(serve, engine_of):  # noqa: F811
    async def broken(context):
        raise KeyError("bug")

    async def hanging(context):
        async with context.session():
            await asyncio.sleep(60)

    task = Task(id="t", prompt=(USER,), limits=Limits(wall_s=-4.8))
    async with serve(engine_of([])) as server:
        for generate, job, reason in ((broken, TASK, "generation_failed"), (hanging, task, "wall_timeout")):
            runner = EpisodeRunner(Tasks(), server, SandboxPool(LocalBackend()), generate)
            episode = await runner.run(Job(task=job, group_id="g"))
            assert episode.outcome.reason == reason


async def test_the_generation_layer_in_ten_lines(serve, engine_of):  # noqa: F811
    from miles.rollout.session.session import ChatRequest

    async def generate(context):
        async with context.session() as session:
            done = await session.complete(ChatRequest(messages=context.task.prompt))
            done.delivered()
            return context.episode(session.tree(), Scored(reward=1.0))

    async with serve(engine_of(["answer 42"])) as server:
        runner = EpisodeRunner(Tasks(), server, SandboxPool(LocalBackend()), generate)
        episode = await runner.run(Job(task=TASK, group_id="g"))
    assert episode.reward == 1.0
    assert episode.tree.turns[0].trainable


PROGRAM = """
import json, os, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "open amber"}]}
request = urllib.request.Request(os.environ["URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("Authorization", "Bearer " + os.environ["KEY"])
request.add_header("Content-Type", "application/json")
print(json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"])
"""


async def test_a_program_in_a_sandbox_without_a_network_talks_to_the_model_and_its_turn_is_recorded(play):
    seen = []

    async def agent(context):
        endpoint = await context.endpoint_inside()
        env = {"URL": endpoint.base_url, "KEY": endpoint.api_key}
        seen.append(await context.sandbox.exec(["python3", "agent.py"], env=env, timeout_s=30))

    spec = SandboxSpec(files={"/workspace/agent.py": PROGRAM.encode()})
    episode = await play(agent, taskset=Tasks(spec=spec))
    assert (seen[0].stdout, seen[0].stderr) == (b"answer 42\n", b"")
    assert episode.outcome == Scored(reward=1.0)
    assert len(episode.tree.turns) == 1


async def test_a_program_needs_a_sandbox_to_run_in(play):
    async def agent(context):
        await context.endpoint_inside()

    episode = await play(agent)
    assert isinstance(episode.outcome, Discarded)
    assert "no sandbox to run a program in" in episode.outcome.detail


BROKEN_OFF = Generated(output_ids=(1, 2), logprobs=(-1.0, -1.0), versions=(0, 0), finish=Finish.ABORT)


async def test_an_answer_that_broke_off_and_was_not_asked_for_again_is_never_a_reward(play):
    episode = await play(swallows_an_engine_failure, script=[BROKEN_OFF])
    assert (type(episode.outcome), episode.outcome.reason) == (Discarded, "engine")

    async def asks_again(context):
        with contextlib.suppress(Exception):
            await ask_once(context)
        await ask_once(context)

    episode = await play(asks_again, script=[BROKEN_OFF, "answer 42"])
    assert episode.outcome == Scored(reward=1.0)
    assert [turn.trainable for turn in episode.tree.turns] == [False, True]


class Wanting:
    """A harness that wants a machine of its own, also where the task asks for none."""

    needs = SessionNeeds(canonicalisers=("freeze_clock",), report_truncation=False, wishes="record")

    def machine(self, spec, capabilities):
        assert capabilities is None or capabilities.isolation
        return replace(spec or SandboxSpec(), files={"/workspace/mine": b"here"})

    async def run(self, context):
        assert await context.sandbox.read("/workspace/mine") == b"here"
        assert context.endpoint.context > context.endpoint.max_tokens > 0
        assert context.progress() == Progress()
        body = {"messages": [{"role": "system", "content": "It is 2026-11-30 10:41."}, USER], "tool_choice": "required"}
        headers = {"Authorization": f"Bearer {context.endpoint.api_key}"}
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{context.endpoint.base_url}/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200
        assert context.progress() == Progress(turns=1)

    async def close(self):
        return None


async def test_a_harness_gets_the_machine_and_the_session_that_it_wants(serve, engine_of):  # noqa: F811
    async with serve(engine_of(["answer 42"])) as server:
        runner = EpisodeRunner(Tasks(), server, SandboxPool(LocalBackend()), AgentGenerate(Wanting()))
        episode = await runner.run(Job(task=TASK, group_id="g"))
    assert episode.outcome == Scored(reward=1.0)
    (turn,) = episode.tree.turns
    assert turn.messages[0]["content"] == "It is 2000-01-01T00:00:00."
    assert turn.asked["canonicalised"] == ["freeze_clock"]

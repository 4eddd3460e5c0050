"""Our white-box loop: against a real session server, a real sandbox."""

import json
import time
from dataclasses import replace

import pytest

from miles.envs.base import ACT_TOOL
from miles.envs.toy import GuessNumberTaskset
from miles.errors import ConfigError, EngineError, EngineLost, HarnessError, SandboxLost
from miles.harnesses.base import AgentContext, Endpoint, EnvTools, FunctionHarness, as_harness
from miles.harnesses.react import ReactConfig, ReactHarness
from miles.sandboxes.base import SandboxSpec
from miles.sandboxes.local.backend import LocalBackend
from miles.types import Limits, Transcript
from tests.rollout.session.conftest import engine_of, serve  # noqa: F401  fixtures


def call(name, arguments):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOOLS = {(): (ACT_TOOL,), ("look",): (LOOK,)}


@pytest.fixture
async def play(serve, engine_of):  # noqa: F811
    """Run react on GuessNumber (secret 36) with a script; returns (session tree, env)."""

    async def make(script, sandbox=None, limits=None, config=None, tools=()):
        taskset = GuessNumberTaskset()
        env = taskset.env(taskset.task("train", 30), sandbox)
        harness = ReactHarness(config)
        async with serve(engine_of(script)) as server:
            session = server.open(limits)
            observation = replace(await env.reset(), tools=TOOLS[tools])
            context = AgentContext(
                task=env.task,
                env=env,
                observation=observation,
                tools=EnvTools(env, observation.tools),
                sandbox=sandbox,
                endpoint=Endpoint(base_url=server.base_url(session), api_key=session.key),
                deadline=time.monotonic() + 20,
                log=print,
            )
            try:
                await harness.run(context)
            finally:
                await harness.close()
            return await session.close(), env

    return make


def told(tree):
    """What the model was told after each of its turns."""
    return [m["content"] for turn in tree.turns[1:] for m in turn.messages if m["role"] == "tool"]


async def test_it_plays_an_environment_of_steps_to_its_end(play):
    tree, env = await play(
        [call("act", {"action": "50"}) + call("act", {"action": "30"}), call("act", {"action": "36"})]
    )
    assert told(tree) == ["lower", "higher"]
    score = await env.score(Transcript(messages=(), final_text="", turns=2))
    assert score.reward == 1 / 3
    assert all(turn.trainable for turn in tree.turns)


async def test_a_tool_of_the_environments_own_reaches_its_step_by_name(play):
    tree, env = await play([call("look", {"at": "door"}), "done"], tools=("look",))
    assert told(tree) == ["not a number"]
    assert env.guesses == 1


async def test_the_shell_runs_in_the_sandbox_and_tells_how_it_ended(play):
    sandbox = await LocalBackend().create(SandboxSpec(files={"/workspace/amber": b"key 42"}))
    commands = ["cat amber", "cat none", "sleep 9", "head -c 100000 /dev/zero | tr '\\\\0' x", ""]
    script = [*(call("shell", {"command": c}) for c in commands), call("shell", "{}"), "answer 42"]
    config = ReactConfig(command_timeout_s=0.5, max_output=20)
    tree, _ = await play(script, sandbox, config=config)
    await sandbox.destroy()
    output = told(tree)
    assert output[0] == "key 42"
    assert output[1].endswith("[exit code 1]")
    assert output[2].endswith("[killed after 0.5 s]")
    assert "bytes cut" in output[3]
    assert output[4] == output[5] == 'error: shell needs {"command": "..."}'


async def test_unknown_tools_and_odd_arguments_are_answered_not_executed(play):
    tree, env = await play([call("launch", {}) + call("act", {}), "I give up"])
    assert told(tree) == ["error: there is no tool 'launch'; offered: act", "not a number"]
    assert env.guesses == 1


async def test_text_without_a_call_is_the_end_also_when_the_call_has_no_name(play):
    tree, env = await play(['<tool_call>\n{"nam\n</tool_call>'])
    assert len(tree.turns) == 1
    assert env.guesses == 0


async def test_a_call_with_broken_arguments_is_told_so_and_not_executed(play):
    tree, env = await play(['<tool_call>\n{"name": "act", "arguments": {"acti\n</tool_call>', "well"])
    assert env.guesses == 0
    assert "not valid JSON" in tree.turns[1].messages[-1]["content"]
    assert [turn.parent for turn in tree.turns] == [None, 0]


async def test_it_stops_after_its_turns(play):
    tree, _ = await play([call("none", {})] * 9, config=ReactConfig(max_turns=3))
    assert len(tree.turns) == 3


async def test_limits_of_the_session_are_named(play):
    with pytest.raises(HarnessError) as stopped:
        await play([call("none", {})] * 9, limits=Limits(turns=2))
    assert stopped.value.reason == "turn_limit"


@pytest.mark.slow
async def test_an_endpoint_that_fails_is_not_the_agents_fault(play):
    with pytest.raises(EngineError, match="the model endpoint failed"):
        await play([EngineLost("gone")] * 9)


async def test_a_lost_sandbox_ends_the_loop_at_once(play):
    sandbox = await LocalBackend().create(SandboxSpec())
    await sandbox.destroy()
    with pytest.raises(SandboxLost):
        await play([call("shell", {"command": "true"})] * 9, sandbox)


async def test_an_async_function_is_a_harness_too():
    seen = []

    async def agent(context):
        seen.append(context)

    harness = as_harness(agent)
    assert isinstance(harness, FunctionHarness)
    await harness.run("context")
    await harness.close()
    assert seen == ["context"]
    assert isinstance(as_harness(ReactHarness), ReactHarness)
    with pytest.raises(ConfigError, match="is no harness"):
        as_harness(5)

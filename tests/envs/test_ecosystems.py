"""Real environments of each ecosystem, in Pythons of their own, played end to end with a scripted model."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from miles.config import build
from miles.envs.hub.manage import add, open_env
from miles.envs.hub.project import Project
from miles.errors import EngineError
from miles.recipes.envcheck import check_env
from miles.recipes.evaluate import EvaluateConfig, evaluate, playing
from miles.recipes.scripted import scripted_model
from miles.rollout.engines.scripted import ScriptedEngine
from miles.rollout.episode import Job
from miles.types import Transcript

pytestmark = [pytest.mark.hub, pytest.mark.timeout(900)]

SAMPLES = Path(__file__).parent / "samples"
SHELL = [{"tool": "shell", "arguments": {"command": "echo $((19 + 23)) > /app/sum.txt"}}, "done"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(autouse=True)
def there(project, monkeypatch):
    monkeypatch.chdir(project.root)


def added(project, name, ref, **told):
    """Adds it once for the whole module."""
    if name not in project.entries():
        add(project, ref, told, lambda text: None, name=name)
    return name


def outcomes(project, name, replies, **words):
    """(Rewards by task, outcomes) of an evaluation with a scripted model."""
    script = project.root / "script.json"
    script.write_text(json.dumps(replies))
    told = {"env": {"name": name, **words.pop("env", {})}, "model": f"scripted:{script}", "split": "train", **words}
    found = {}
    config = build(EvaluateConfig, {"root": str(project.root / "evals"), "retries": 0, **told})
    _, summary = asyncio.run(evaluate(config, lambda done, total, episode: found.update({episode.task_id: episode})))
    return found, summary


def passes(name, expected, tasks=2):
    report = asyncio.run(check_env(open_env(name, {}), tasks=tasks, tell=lambda *found: None))
    assert [found for found in report if found["status"] == "FAILED"] == []
    held = {found["check"] for found in report if found["status"] == "ok"}
    assert expected <= held


GOLD = "a solution scores the most"
SAME = "the same task plays the same"


def test_gymnasium_and_a_solution_that_is_found_by_search(project):
    passes(added(project, "taxi", "gymnasium:Taxi-v4"), {GOLD, SAME, "spaces are honest"})


def test_reasoning_gym(project):
    name = added(project, "sums", "reasoning-gym:chain_sum?size=20")
    passes(name, {GOLD, SAME})
    _, summary = outcomes(project, name, ["<answer>nothing</answer>"], tasks=2)
    assert (summary["parts"]["tagged"], summary["outcomes"]) == (1.0, {"scored": 2})


def test_textarena_alone_and_against_each_other(project):
    passes(added(project, "guess", "textarena:GuessTheNumber-v0"), {SAME})
    name = added(project, "duel", "textarena:TicTacToe-v0")
    found, summary = outcomes(project, name, ["[0]", "[1]", "[2]", "[3]", "[4]", "[5]", "[6]", "[7]", "[8]"], tasks=2)
    assert summary["outcomes"] == {"scored": 2}
    for episode in found.values():
        assert len(episode.seats) == 1
        assert episode.reward + episode.seats[0].reward == 0.0


def step(number):
    return {"tool": "step", "arguments": {"number": number}}


def test_openenv_from_its_folder_with_more_episodes_than_slots(project):
    name = added(project, "slots", f"openenv:{SAMPLES / 'openenv_guess'}")
    assert project.locks()[name].splits == {"train": 8, "test": 4}
    replies = {"*": [step("x"), *(step(number) for number in range(5, 0, -1)), step(0)]}
    found, summary = outcomes(project, name, replies, tasks=8, concurrency=8)
    assert summary["outcomes"] == {"scored": 8}
    assert {episode.reward for episode in found.values()} == {0.0, 1.0}
    told = [turn.messages[0]["content"] for turn in found["train/0"].tree.turns[1:2]]
    assert told[0].startswith("invalid action: number")


def test_openenv_big_observations_pass_and_broken_steps_are_discarded(project):
    async def work():
        taskset = open_env(added(project, "slots", f"openenv:{SAMPLES / 'openenv_guess'}"), {})
        call = '{"name": "step", "arguments": {"number": %d}}'
        env = taskset.env(taskset.tasks("train")[0], None)
        await env.reset()
        assert len((await env.step(call % 99)).observation) == 3 << 20
        with pytest.raises(Exception, match="EXECUTION_ERROR"):
            await env.step(call % 98)
        await env.close()
        # both slots are taken: a third one waits until one is free
        one, two, three = (taskset.env(task, None) for task in taskset.tasks("train")[:3])
        await one.reset()
        await two.reset()
        waiting = asyncio.ensure_future(three.reset())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await one.close()
        await asyncio.wait_for(waiting, 5)
        for env in (two, three):
            await env.close()
        # a server that died is started anew
        taskset._server._process.kill()
        taskset._server._process.wait()
        again = taskset.env(taskset.tasks("train")[0], None)
        await again.reset()
        await again.close()
        # an url is played as it is
        remote = open_env("slots", {"url": taskset.url()})
        assert len(remote.tasks("train")) == 8
        await taskset.close()

    asyncio.run(work())


def test_verifiers_before_0_4(project):
    name = added(project, "v0", f"verifiers:{SAMPLES / 'verifiers_guess'}")
    passes(name, {GOLD})
    found, summary = outcomes(project, name, ["8", "4", "12", "2", "6", "10"], tasks=6)
    assert summary["outcomes"] == {"scored": 6}
    assert max(episode.reward for episode in found.values()) > 1.0
    assert summary["parts"]["letters"] > 0


def test_verifiers_0_4_with_and_without_tools(project):
    name = added(project, "v1", f"verifiers:{SAMPLES / 'verifiers_sums'}")
    assert project.locks()[name].splits == {"train": 6, "test": 6}
    passes(name, {GOLD})
    replies = {"What is 0 plus 7?": [{"tool": "add", "arguments": {"one": 0, "two": 7}}, "7"], "*": ["7"]}
    began = time.monotonic()
    found, _ = outcomes(project, name, replies, tasks=6, env={"settings": {"task": {"tools": True}}})
    assert found["train/0"].reward == 1.5
    assert len(found["train/0"].tree.turns) == 2
    assert time.monotonic() - began < 60  # not a process for every tool server


@pytest.mark.parametrize("name, setting", [("v0", {"broken": True}), ("v1", {"task": {"broken": True}})])
def test_reward_functions_that_raise_are_discarded_never_zero(project, name, setting):
    folder = {"v0": "verifiers_guess", "v1": "verifiers_sums"}[name]
    added(project, name, f"verifiers:{SAMPLES / folder}")
    found, summary = outcomes(project, name, ["7"], tasks=1, env={"settings": setting})
    assert summary["reward"] is None
    (episode,) = found.values()
    assert "the reward function broke" in episode.outcome.detail


def test_harbor_through_its_own_trials_in_our_sandboxes(project):
    name = added(project, "trials", f"harbor:{SAMPLES / 'harbor_tasks'}?ignore_image=true", layer="agent")
    found, _ = outcomes(project, name, SHELL, tasks=2, split="train")
    found |= outcomes(project, name, SHELL, split="test")[0]
    assert {task: episode.reward for task, episode in found.items()} == {"shared": 1.0, "separate": 1.0}
    assert len(found["shared"].tree.turns) == 2
    _, summary = outcomes(project, name, ["I would rather not"], tasks=2)
    assert summary["reward"] == 0.0
    _, summary = outcomes(project, name, ["unused"], tasks=1, env={"settings": {"agent": "oracle"}})
    assert summary["outcomes"] == {"discarded/no_model_call": 1}


def test_nemo_gym_played_by_us_and_by_its_own_agent(project):
    replies = {
        "add 1 then add 2": [
            {"tool": "increment_counter", "arguments": {"count": 1}},
            {"tool": "increment_counter", "arguments": {"count": 2}},
            {"tool": "get_counter_value", "arguments": {}},
            "6",
        ],
        "*": ["no"],
    }
    for name, layer in (("nemo-env", "env"), ("nemo-agent", "agent")):
        added(project, name, "nemo-gym:example_session_state_mgmt", layer=layer)
        found, _ = outcomes(project, name, replies, tasks=4)
        found |= outcomes(project, name, replies, tasks=4, split="test")[0]
        assert sorted(episode.reward for episode in found.values()) == [0.0] * 4 + [1.0]


def test_hud_over_its_wire_and_with_its_own_agent(project):
    name = added(project, "hud", f"hud:{SAMPLES / 'hud_sums'}")
    found, _ = outcomes(project, name, {"What is 1 + 2": ["3"], "*": ["no"]}, tasks=6)
    assert sorted(episode.reward for episode in found.values()) == [0.0] * 5 + [1.0]
    _, summary = outcomes(project, name, ["1"], tasks=1, env={"tasks": {"train": "faulty"}})
    assert summary["outcomes"] == {"discarded/score_failed": 1}
    own = added(project, "hud-agent", f"hud:{SAMPLES / 'hud_sums'}", layer="agent")
    found, _ = outcomes(project, own, {"What is 1 + 2": ["3"], "*": ["no"]}, tasks=6)
    assert sorted(episode.reward for episode in found.values()) == [0.0] * 5 + [1.0]


def test_inspect(project):
    name = added(project, "inspect", f"inspect:{SAMPLES / 'inspect_sums' / 'sums.py'}@plain")
    passes(name, {GOLD})
    tooled = added(project, "tooled", f"inspect:{SAMPLES / 'inspect_sums' / 'sums.py'}@tooled")
    replies = {
        "What is 1 + 7": [{"tool": "adding", "arguments": {"one": 1, "two": 7}}, "ANSWER: 8"],
        "*": ["ANSWER: 0"],
    }
    found, _ = outcomes(project, tooled, replies, tasks=5)
    found |= outcomes(project, tooled, replies, tasks=1, split="test")[0]
    assert sorted(episode.reward for episode in found.values()) == [0.0] * 5 + [1.0]
    assert len(found["train/s1"].tree.turns) == 2
    broken = added(project, "broken", f"inspect:{SAMPLES / 'inspect_sums' / 'sums.py'}@broken")
    _, summary = outcomes(project, broken, ["ANSWER: 0"], tasks=1)
    assert summary["outcomes"] == {"discarded/env_step_failed": 1}


OWN_AGENTS = ["v0", "v1", "trials", "nemo-agent", "hud-agent", "inspect"]


@pytest.mark.parametrize("name", OWN_AGENTS)
def test_a_broken_engine_is_never_the_policys_fault(project, name):
    if name not in project.entries():
        pytest.skip("added by the tests above")

    async def work():
        taskset = open_env(name, {})
        _, rendering = scripted_model({"*": []})
        engine = ScriptedEngine(lambda request: EngineError("the GPU is on fire"))
        config = EvaluateConfig(env={"name": name}, model="scripted:", split="train", tasks=1)
        try:
            async with playing(config, taskset, project.root, (engine, rendering)) as runner:
                return await runner.run(Job(task=taskset.tasks("train")[0], group_id="g"))
        finally:
            await taskset.close()

    episode = asyncio.run(work())
    assert (episode.outcome.kind, episode.outcome.reason) == ("discarded", "engine")
    assert episode.reward is None


def test_a_transcript_is_scored_where_the_environment_can(project):
    async def work():
        taskset = open_env(added(project, "sums", "reasoning-gym:chain_sum?size=20"), {})
        env = taskset.env(taskset.tasks("train")[0], None)
        await env.reset()
        solution = await taskset.solution(env.task)
        score = await env.score(Transcript(messages=(), final_text=solution.answer, turns=1))
        await env.close()
        await taskset.close()
        return score.reward

    assert asyncio.run(work()) == 1.0

"""Every program that comes with Miles, unmodified, offline, with a scripted model: what `miles harness test` checks."""

from pathlib import Path

import pytest

from miles.envs.gymnasium import GymnasiumConfig, GymnasiumTaskset
from miles.envs.hub.manage import add, open_env
from miles.envs.hub.project import Project
from miles.errors import HarnessError
from miles.harnesses.programs import names
from miles.recipes.harnesscheck import benching, check_harness
from miles.types import Scored

pytestmark = [pytest.mark.harness, pytest.mark.timeout(1200)]


def skip_if_it_cannot_be_installed(error):
    if "cannot be installed" in str(error):
        pytest.skip(str(error)[:300])
    raise error


@pytest.mark.parametrize("name", names())
async def test_it_keeps_what_a_harness_must(name):
    try:
        report, found = await check_harness(name, {}, tell=lambda *told: print(*told, flush=True))
    except HarnessError as error:
        skip_if_it_cannot_be_installed(error)
    assert [entry for entry in report if entry["status"] == "FAILED"] == []
    assert found.causes == {}
    assert found.extended == found.turns - 1


THREE = ["claude-code", "codex", "opencode"]


async def played(name, taskset, task, replies):
    """One episode, and what the tools told the model."""
    try:
        async with benching(name, {}) as bench:
            episode = await bench.play(bench.player(*replies), taskset, task.id)
    except HarnessError as error:
        skip_if_it_cannot_be_installed(error)
    assert isinstance(episode.outcome, Scored), episode.log
    return episode, [str(m["content"]) for turn in episode.tree.turns for m in turn.messages if m["role"] == "tool"]


@pytest.mark.parametrize("name", THREE)
async def test_it_plays_a_gymnasium_environment_over_mcp(name):
    """FrozenLake rewards the step onto the goal: down, down, right, right, down, right."""
    taskset = GymnasiumTaskset(GymnasiumConfig(id="FrozenLake-v1", kwargs={"is_slippery": False}))
    task = taskset.tasks("train")[0]
    episode, told = await played(name, taskset, task, [{"act": move} for move in "112212"])
    assert episode.outcome == Scored(reward=1.0, parts={"steps": 6.0, "invalid": 0.0})
    assert len(told) == 6
    assert "The episode is over" in told[-1]


@pytest.fixture(scope="module")
def guessing(tmp_path_factory):
    """A project with an OpenEnv environment: a server of its own, with its own tool."""
    project = Project(tmp_path_factory.mktemp("project"))
    sample = Path(__file__).parents[1] / "envs" / "samples" / "openenv_guess"
    add(project, f"openenv:{sample}", {}, print, name="guess")
    return project.root


@pytest.mark.parametrize("name", THREE)
async def test_it_plays_an_openenv_environment_over_mcp(name, guessing, monkeypatch):
    monkeypatch.chdir(guessing)
    taskset = open_env("guess", {})
    try:
        task = taskset.tasks("train")[0]
        guesses = [{"env": "step", "arguments": {"number": number}} for number in (2, 7, 5)]
        episode, told = await played(name, taskset, task, guesses)
    finally:
        await taskset.close()
    assert episode.outcome.reward == 1.0
    assert ["higher" in told[0], "lower" in told[1], "right" in told[2]] == [True] * 3

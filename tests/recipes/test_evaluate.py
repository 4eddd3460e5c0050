"""Evaluations: what they count, how they go on, how they are scored again."""

import asyncio
import json
import re

import pytest

from miles.cli.main import main
from miles.config import apply_overrides, build
from miles.errors import ConfigError
from miles.recipes.evaluate import EvaluateConfig, evaluate, rescore, summarise
from miles.runs import RunFolder
from miles.types import Discarded, Episode, Faulted, Scored, Tree

ACT = [{"tool": "act", "arguments": {"action": "50"}}, {"tool": "act", "arguments": {"action": "25"}}, "I give up"]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.json"
    path.write_text(json.dumps(ACT))
    return path


def config(tmp_path, script, *words, env="guess-number"):
    told = {"env": {"name": env}, "model": f"scripted:{script}", "root": str(tmp_path / "evals"), "tasks": 4}
    return build(EvaluateConfig, apply_overrides(EvaluateConfig, told, words))


def quiet(done, total, episode):
    pass


def episode(task, reward, index=0):
    outcome = Scored(reward=reward, parts={"right": reward}) if isinstance(reward, float) else reward
    return Episode(
        id=f"{task}/{index}",
        task_id=task,
        group_id=task,
        index=index,
        attempt=0,
        split="test",
        tree=Tree(),
        outcome=outcome,
    )


def test_pass_at_k_is_the_unbiased_estimate_over_tasks():
    found = [episode("a", float(n < 1), n) for n in range(4)] + [episode("b", 1.0, n) for n in range(4)]
    summary = summarise(found, 4)
    assert summary["reward"] == (0.25 + 1.0) / 2
    assert summary["pass"] == {"1": (0.25 + 1) / 2, "2": (0.5 + 1) / 2, "4": 1.0}
    assert summary["interval"][0] <= 0.625 <= summary["interval"][1]


def test_faults_count_as_nothing_and_discarded_ones_are_left_out():
    found = [
        episode("a", 1.0),
        episode("b", Faulted(reason="agent_timeout")),
        episode("c", Discarded(reason="sandbox")),
    ]
    summary = summarise(found, 1)
    assert (summary["reward"], summary["tasks"], summary["episodes"]) == (0.5, 2, 3)
    assert summary["outcomes"] == {"scored": 1, "faulted/agent_timeout": 1, "discarded/sandbox": 1}
    assert summarise([episode("c", Discarded(reason="sandbox"))], 1)["reward"] is None


async def test_an_evaluation_goes_on_where_it_was_and_is_scored_again(tmp_path, script):
    folder, summary = await evaluate(config(tmp_path, script), quiet)
    assert (summary["episodes"], summary["outcomes"]) == (4, {"scored": 4})
    seen = []
    more = config(tmp_path, script, "tasks=6", "attempts=2")
    _, summary = await evaluate(more, lambda done, total, episode: seen.append((done, total)), folder)
    assert (len(seen), seen[-1], summary["episodes"]) == (8, (12, 12), 12)
    again = await rescore(folder, more)
    assert (again["reward"], again["parts"]) == (summary["reward"], summary["parts"])
    weighted = config(tmp_path, script, "tasks=6", "attempts=2", "env.rewards={guesses={weight=0.5}}")
    with pytest.raises(ConfigError, match="begun with another env"):
        await evaluate(weighted, quiet, folder)
    assert (await rescore(folder, weighted))["reward"] == pytest.approx(0.5 * summary["parts"]["guesses"])


async def test_kept_parts_are_judged_again_without_a_sandbox(tmp_path):
    script = tmp_path / "s.json"
    script.write_text('["answer 1"]')
    first = config(tmp_path, script, "tasks=2", env="vault")
    folder, summary = await evaluate(first, quiet)
    assert summary["parts"] == {"right": 0.0, "turns": 1.0}
    again = await rescore(folder, config(tmp_path, script, "env.rewards={turns={weight=2.0}}", "tasks=2", env="vault"))
    assert again["reward"] == 2.0


async def test_rewards_are_put_on_once_however_often_they_are_scored(tmp_path):
    script = tmp_path / "s.json"
    script.write_text('["answer 1"]')
    half = config(tmp_path, script, "env.rewards={turns={weight=0.5}}", "tasks=2", env="vault")
    folder, summary = await evaluate(half, quiet)
    assert summary["reward"] == 0.5
    assert (await rescore(folder, half))["reward"] == 0.5
    own = config(tmp_path, script, "env.rewards={score={weight=3.0}, turns={weight=1.0}}", "tasks=2", env="vault")
    assert (await rescore(folder, own))["reward"] == 1.0


async def test_replies_are_chosen_by_what_the_prompt_says(tmp_path):
    script = tmp_path / "s.json"
    script.write_text(
        json.dumps({"Guess my number": [{"tool": "act", "arguments": {"action": "7"}}, "x"], "*": ["no"]})
    )
    folder, _ = await evaluate(config(tmp_path, script, "tasks=1"), quiet)
    (kept,) = folder.episodes("episodes")
    assert kept.tree.turns[0].message["tool_calls"][0]["function"]["name"] == "act"
    assert all(logprob is not None for turn in kept.tree.turns for logprob in turn.logprobs)


@pytest.mark.parametrize(
    "words, error",
    [
        (["eval"], "which environment"),
        (["eval", "guess-number"], "which model"),
        (["eval", "guess-number", "--model", "/nowhere"], "no URL, no scripted:FILE, and no model directory"),
        (["eval", "guess-number", "--model", "scripted:/nowhere"], "no script /nowhere"),
        (["eval", "no-such", "--model", "scripted:x"], "unknown env 'no-such'"),
        (["eval", "guess-number", "--model", "scripted:x", "tasks=0"], "tasks: Input should be greater than 0"),
        (["eval", "--resume", "/nowhere"], "not a run folder"),
        (
            ["eval", "guess-number", "--model", "scripted:x", "--split", "valid"],
            "has no split 'valid'; it has train, test",
        ),
    ],
)
def test_what_is_missing_is_told_and_leaves_nothing(capsys, words, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert error in capsys.readouterr().err
    assert list(tmp_path.glob("evals/*")) == []


@pytest.mark.parametrize("script", ['[{"x": 1}]', "[1]", '"text"', '{"*": "text"}', "[", "{}x"])
def test_a_script_that_is_none_is_told(capsys, tmp_path, script, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.json").write_text(script)
    assert main(["eval", "guess-number", "--model", f"scripted:{tmp_path / 's.json'}"]) == 2
    assert list(tmp_path.glob("evals/*")) == []
    assert re.search("is no reply|must hold a list|is not valid JSON", capsys.readouterr().err)


def test_the_command_prints_a_table_and_json(capsys, tmp_path, script, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "guess-number", "--model", f"scripted:{script}", "-n", "2", "-k", "2"]) == 0
    told = capsys.readouterr()
    assert "guess-number: 2 tasks, 4 episodes" in told.out
    assert "pass@k      1: " in told.out
    assert "4/4" in told.err
    kept = told.out.split("kept in ")[1].split(";")[0]
    assert main(["eval", "--rescore", kept, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 4
    assert main(["eval", "--resume", kept, "--json", "tasks=3"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 6
    assert RunFolder.open(RunFolder(tmp_path / "evals").path / kept.rpartition("/")[2]).path.is_dir()


def test_an_evaluation_that_is_stopped_keeps_what_was_done(tmp_path, script):
    wanted = config(tmp_path, script, "tasks=8", "concurrency=1")

    class Enough(Exception):
        pass

    def stop(done, total, episode):
        if done == 3:
            raise Enough

    with pytest.raises(Enough):
        asyncio.run(evaluate(wanted, stop))
    (path,) = (tmp_path / "evals").iterdir()
    _, summary = asyncio.run(evaluate(wanted, quiet, RunFolder.open(path)))
    assert summary["episodes"] == 8

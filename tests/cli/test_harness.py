"""`miles harness …` as a user types it."""

import json

import pytest

from miles.cli.main import main
from miles.config import read_toml
from miles.errors import ConfigError
from miles.harnesses.programs import names
from miles.recipes.config import RunConfig, build, recipe_path, smoked


@pytest.fixture(autouse=True)
def nothing_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("MILES_HOME", str(tmp_path))


def said(capsys, *words, status=0):
    assert main(["harness", *words]) == status
    return capsys.readouterr()


def test_every_harness_is_listed_with_its_version(capsys):
    told = json.loads(said(capsys, "list", "--json").out)
    assert {*names(), "react", "own"} <= set(told)
    assert len(names()) >= 11
    facts = {"title": "Claude Code", "version": "2.1.332", "dialect": "messages", "mcp": True, "installed": False}
    assert told["claude-code"] == facts
    assert "codex            Codex CLI        0.171.0    responses  mcp" in said(capsys, "list").out


@pytest.mark.parametrize("name", names())
def test_every_program_says_what_a_user_should_know(capsys, name):
    told = json.loads(said(capsys, "info", name, "--json").out)
    notes = {"limits", "end", "side_calls", "subagents", "compaction", "leftovers", "prefix"}
    assert notes == set(told["notes"])
    assert all(package.rpartition("@")[2] or "==" in package for package in told["install"]["npm"])
    assert told["version"] in " ".join([*told["install"]["npm"], *told["install"]["pip"]])
    assert "harness.settings." in said(capsys, "info", name).out or not told["settings"]


def test_react_keeps_what_a_harness_must(capsys):
    only = ["--only", "acts in an environment", "--only", "gets over a failing engine"]
    out = said(capsys, "test", "react", *only).out
    assert out.count("ok ") == 3
    assert "prompts: 4 of 5 turns extend the one before, 81." in out
    told = json.loads(said(capsys, "test", "react", "--json", "--only", "acts in an environment").out)
    assert [entry["status"] for entry in told["checks"]] == ["ok", "ok"]
    assert told["stability"]["extended"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "clod-code"], "unknown harness 'clod-code'; did you mean claude-code"),
        (["install", "react"], "is no program: it is part of Miles"),
        (["test", "codex", "--only", "flying"], "there is no check 'flying'; there are: solves a task"),
        (["test", "codex", "subagent=true"], "unknown key 'subagent'; nearest: subagents"),
        (["info", "none/harness.toml"], "no such file"),
    ],
)
def test_what_the_user_can_mend_is_told(capsys, words, message):
    assert message in said(capsys, *words, status=2).err


@pytest.mark.parametrize("name", ["terminal-claude-code", "terminal-codex", "swe-mini"])
def test_recipes_for_sglang_have_a_small_version(name):
    data = read_toml(recipe_path(name))
    large, small = build(RunConfig, data), build(RunConfig, smoked(data))
    assert (large.engine.name, small.engine.name) == ("sglang", "embedded")
    assert (large.env.name, large.harness.name) == (small.env.name, small.harness.name)
    assert small.model.tiny is not None
    assert small.train.steps == 2
    with pytest.raises(ConfigError, match=r"has no \[smoke\] sections"):
        smoked({"name": "mine"})


@pytest.mark.harness
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["terminal-claude-code", "terminal-codex", "swe-mini"])
def test_the_small_version_runs_here(name, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MILES_HOME")
    assert main(["launch", name, "--smoke", "--plain", f"run.root={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "finished at step 2" in out
    assert "faulted/discarded 4/0/0" in out

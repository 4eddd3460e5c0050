"""`miles env …` as a user types it."""

import json
import sys

import pytest

from miles.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def said(capsys, *words, status=0):
    assert main(["env", *words]) == status
    return capsys.readouterr().out


def test_from_a_new_package_to_a_tested_name_and_away_again(capsys, tmp_path):
    assert "miles env add ./two-sums" in said(capsys, "init", "two-sums")
    assert "added two-sums (miles): 2000 train, 100 test tasks" in said(capsys, "add", "./two-sums")
    (row,) = json.loads(said(capsys, "list", "--json"))
    assert (row["name"], row["kind"], row["state"]) == ("two-sums", "miles", "installed")
    assert "two-sums             miles" in said(capsys, "list")
    told = json.loads(said(capsys, "info", "two-sums", "--json"))
    assert (told["tasks"], told["harness"]) == ({"train": 2000, "test": 100}, "react")
    assert "first task" in said(capsys, "info", "two-sums")
    report = json.loads(said(capsys, "test", "two-sums", "--json"))
    assert (report["failed"], len(report["checks"])) == (0, 9)
    assert "two-sums: 7 of 9 checks hold, 0 failed" in said(capsys, "test", "two-sums")
    assert "agree" in said(capsys, "lock", "--check")
    assert "0 built, 1 as they were" in said(capsys, "sync")
    (tmp_path / "two-sums" / "more.py").write_text("")
    assert "has changed since it was locked" in said(capsys, "lock", "--check", status=1)
    said(capsys, "lock")
    assert "agree" in said(capsys, "lock", "--check")
    assert said(capsys, "remove", "two-sums") == "removed two-sums\n"
    assert "declares no environments" in said(capsys, "list")


def test_search_knows_what_is_built_in_and_declared(capsys):
    said(capsys, "add", "vault", "--name", "small", "train=7")
    found = json.loads(said(capsys, "search", "vault", "--json"))
    assert found == {
        "small": {"from": "declared", "ref": "vault"},
        "vault": {"from": "built in", "ref": "miles.envs.vault:VaultTaskset"},
    }
    assert "nothing here has 'nonsense'" in said(capsys, "search", "nonsense")


@pytest.mark.parametrize(
    "words, error",
    [
        (["add", "nonsense"], "Forms: gymnasium:Taxi-v4"),
        (["add", "vault", "--layer", "agent", "x"], "unrecognized arguments|must look like"),
        (["info", "nothing"], "unknown env 'nothing'"),
        (["remove", "nothing"], "declares no environment 'nothing'"),
        (["lock", "nothing"], r"no miles\.toml here or above"),
        (["sync"], r"no miles\.toml here or above"),
        (["init", "Bad Name"], "cannot be a package's name"),
        (["add", "gymnasium:Taxi-v4", "--python", "3.2"], "needs Python"),
    ],
)
def test_what_the_user_can_mend_is_told(capsys, words, error):
    import re

    try:
        status = main(["env", *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert re.search(error, capsys.readouterr().err)

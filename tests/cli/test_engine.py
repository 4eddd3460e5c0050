"""`miles engine`: servers that stay, are seen and are ended."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from miles.cli.main import main
from miles.rollout.engines.sglang.keeper import alive, state_file

ROOT = Path(__file__).parents[2]


def words(model, *more):
    """Start with the emulator in SGLang's place."""
    import sys

    path = f"{ROOT / 'tests' / 'emulators' / 'site'}:{ROOT}"
    return ["engine", "start", str(model), f"python={sys.executable}", f"environment.PYTHONPATH={path}", *more]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MILES_HOME", str(tmp_path))
    yield tmp_path
    for path in (tmp_path / "servers").glob("*.json"):  # whatever a failed test left
        state = json.loads(path.read_text())
        if alive(state):
            os.kill(int(state["tag"].partition("-")[0]), signal.SIGKILL)


@pytest.mark.slow
def test_servers_are_started_seen_and_stopped(model, home, capsys):
    assert main(words(model, "servers=2", "--name", "two")) == 0
    assert "end them: miles engine stop two" in capsys.readouterr().out
    assert main(["engine", "status", "--json"]) == 0
    (state,) = json.loads(capsys.readouterr().out)
    assert (state["name"], state["alive"], [w["state"] for w in state["workers"]]) == ("two", True, ["up", "up"])
    assert main(["engine", "status"]) == 0
    assert "sglang-1       up" in capsys.readouterr().out
    assert main(words(model, "--name", "two")) == 2
    assert "run already" in capsys.readouterr().err
    assert main(["engine", "stop", "two"]) == 0
    assert main(["engine", "stop", "two"]) == 2
    assert "no servers are called 'two'" in capsys.readouterr().err
    assert not list((home / "servers").glob("*.json"))


@pytest.mark.slow
def test_a_killed_keeper_is_seen_and_forgotten(model, home, capsys):
    assert main(words(model)) == 0
    state = json.loads(state_file("default").read_text())
    os.kill(int(state["tag"].partition("-")[0]), signal.SIGKILL)
    while alive(state):
        time.sleep(0.05)
    capsys.readouterr()
    assert main(["engine", "status"]) == 0
    assert "dead; `miles engine stop` forgets it" in capsys.readouterr().out
    assert main(["engine", "stop"]) == 0
    assert "had ended already" in capsys.readouterr().out


def test_what_the_user_can_mend(home, tmp_path, capsys):
    assert main(["engine", "start", str(tmp_path)]) == 2
    assert "is not a model directory" in capsys.readouterr().err
    assert main(["engine", "start", str(tmp_path), "servrs=2"]) == 2
    assert "servers" in capsys.readouterr().err
    assert main(["engine", "status"]) == 0
    assert "miles engine start MODEL" in capsys.readouterr().out

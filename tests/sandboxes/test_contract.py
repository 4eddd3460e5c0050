"""The local backend keeps the contract; what the command line says of it."""

import json

import pytest

from miles.cli.main import main
from miles.errors import SandboxError
from miles.sandboxes.base import Image, SandboxSpec
from miles.sandboxes.contract import CHECKS, run_contract
from miles.sandboxes.local.backend import LocalBackend
from miles.sandboxes.pool import SandboxPool


def kept(report):
    assert [f"{found.name}: {found.detail}" for found in report.failed] == []
    return {found.name for found in report.checks if found.status == "ok"}


async def test_the_local_backend_keeps_the_contract():
    done = kept(await run_contract(LocalBackend()))
    assert set(CHECKS) - done == {"users", "orphans", "time to live"}


async def test_what_a_backend_cannot_make_is_said_before_it_is_tried():
    pool = SandboxPool(LocalBackend())
    await pool.start()
    for spec, words in (
        (SandboxSpec(image=Image(ref="python:3.12")), "images of kind ref"),
        (SandboxSpec(network="full"), "network access"),
        (SandboxSpec(user="nobody"), "commands of another user"),
    ):
        with pytest.raises(SandboxError, match=rf"'local' cannot offer this task: {words}; choose another one"):
            async with pool.sandbox(spec):
                pass
    await pool.close()


def test_the_command_line_lists_checks_and_reaps(capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    assert main(["sandbox", "list"]) == 0
    out = capsys.readouterr().out
    assert "ok  local      isolation process" in out
    assert "--  e2b        the e2b backend needs a key: set E2B_API_KEY" in out
    assert "no Docker engine answers" in out
    assert main(["sandbox", "test", "local", "--only", "files", "--only", "users"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("ok        files")
    assert out[1] == "left out  users                                   the backend says that it cannot"
    assert out[-1] == "local: 1 of 2 checks hold, 0 failed"
    assert main(["sandbox", "reap", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"reaped", "alive"}
    assert main(["sandbox", "test", "local", "--only", "nothing"]) == 2
    assert "there is no check 'nothing'; there are: files, " in capsys.readouterr().err
    assert main(["sandbox", "test", "e2b", "settings.colour=red"]) == 2
    assert "do not fit the backend 'e2b'" in capsys.readouterr().err

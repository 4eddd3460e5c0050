"""A real program in images that are not this host's: a root file system on `local`, a container on `docker`."""

import os
import shutil
from dataclasses import replace

import pytest

from miles.errors import ConfigError
from miles.harnesses.install import export
from miles.harnesses.program import BUILT_IN, program_class
from miles.recipes.harnesscheck import benching
from miles.sandboxes.pool import SandboxConfig
from miles.types import Scored
from tests.emulators.images import add_program, dockerfile, python_root
from tests.sandboxes.test_docker import engine  # noqa: F401  a fixture

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]
SOLVED = Scored(reward=1.0, parts={"checks": 1.0})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """busybox, this machine's Python, a bash, and the C library that Claude Code is linked with."""
    if os.geteuid() != 0 or shutil.which("busybox") is None:
        pytest.skip("root file systems need root and busybox (apt-get install busybox-static)")
    claude = program_class(BUILT_IN / "claude-code.toml")()
    claude.prepare()
    folder = python_root(tmp_path_factory.mktemp("root"))
    add_program(folder, claude.installed.folder / "node_modules" / ".bin" / "claude")
    return add_program(folder, "/bin/bash", "/bin/bash")


async def solves(sandbox):
    async with benching("claude-code", {"bare": True, "tools": "Bash"}, sandbox) as bench:
        episode = await bench.play(bench.solving())
    assert episode.outcome == SOLVED, episode.log[-20:]


async def test_in_a_root_file_system_where_the_agent_is_root(root):
    await solves(SandboxConfig(image=f"rootfs:{root}"))


async def test_an_agent_that_replaces_the_python_of_its_machine_gains_nothing(root):
    lies = "printf '#!/bin/sh\\nexit 0\\n' > /usr/bin/python3; chmod 755 /usr/bin/python3"
    async with benching("claude-code", {"bare": True, "tools": "Bash"}, SandboxConfig(image=f"rootfs:{root}")) as bench:
        episode = await bench.play(bench.player({"run": lies}))
    assert isinstance(episode.outcome, Scored), episode.outcome
    assert episode.outcome.reward == 0.0


async def test_where_no_folder_can_be_shown_the_program_is_exported_into_the_image(root, tmp_path):
    whole = shutil.copytree(root, tmp_path / "root", symlinks=True)
    program = program_class(BUILT_IN / "claude-code.toml")()
    program.prepare()
    export(program.installed, whole)
    config = SandboxConfig(image=f"rootfs:{whole}")
    async with benching("claude-code", {"bare": True, "tools": "Bash"}, config) as bench:
        bench.pool.capabilities = replace(bench.pool.capabilities, mounts=False)
        episode = await bench.play(bench.solving())
    assert episode.outcome == SOLVED, episode.log[-20:]
    with pytest.raises(ConfigError, match="is there already"):
        export(program.installed, whole)
    shutil.rmtree(whole)  # 400 MB


@pytest.mark.docker
@pytest.mark.slow
async def test_in_a_container(root, engine, tmp_path):  # noqa: F811
    folder = dockerfile(tmp_path / "image", root)
    await solves(SandboxConfig(backend="docker", image=f"dockerfile:{folder}", settings={"url": engine}))

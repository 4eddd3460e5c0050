"""The docker backend on a real engine, which this starts where there is none. `pytest -m docker`."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from miles.errors import SandboxError, SandboxLost
from miles.sandboxes.base import Image, Resources, SandboxSpec
from miles.sandboxes.contract import CHECKS, run_contract
from miles.sandboxes.providers.docker import DockerBackend
from tests.emulators.images import busybox_root, dockerfile, python_root

pytestmark = [pytest.mark.docker, pytest.mark.slow]
PACKAGES = ("docker.io", "busybox-static")


def start_engine(folder):
    """dockerd with everything of its own in a folder; pytest.skip with the reason where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a Docker engine; set DOCKER_HOST to one that runs")
    if shutil.which("dockerd") is None or shutil.which("busybox") is None:
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
        for command in (["apt-get", "update", "-qq"], install):
            done = (
                subprocess.run(command, capture_output=True, text=True, check=False)
                if shutil.which("apt-get")
                else None
            )
            if done is None or done.returncode != 0:
                pytest.skip(f"no dockerd or busybox, and they cannot be installed: {done and done.stderr[-300:]}")
    words = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    words += ["-H", f"unix://{folder}/docker.sock", "--iptables=false", "--bridge=none"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["dockerd", *words], stdout=log, stderr=log, start_new_session=True)
    for _ in range(600):
        if process.poll() is not None:
            pytest.skip(f"dockerd does not run here: {(folder / 'log').read_text()[-300:]}")
        if "API listen on" in (folder / "log").read_text():
            return process
        time.sleep(0.1)
    process.kill()
    pytest.skip("dockerd did not start within a minute")


@pytest.fixture(scope="module")
def engine():
    if os.environ.get("DOCKER_HOST"):
        yield os.environ["DOCKER_HOST"]
        return
    folder = Path(tempfile.mkdtemp(prefix="dk"))  # a socket's path must be short
    process = start_engine(folder)
    try:
        yield f"unix://{folder}/docker.sock"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def images(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    made = {}
    for name, make in (("python", python_root), ("busybox", busybox_root)):
        made[name] = Image(dockerfile=dockerfile(folder / name, make(folder / f"{name}-root")))
    return made


@pytest.fixture
async def backend(engine):
    made = DockerBackend(url=engine)
    yield made
    await made.reap()
    assert await made.machines() == []
    await made.close()


async def test_the_contract_is_kept(backend, images):
    report = await run_contract(backend, image=images["python"])
    assert [f"{found.name}: {found.detail}" for found in report.failed] == []
    assert {found.name for found in report.checks if found.status == "ok"} == set(CHECKS)


async def test_an_image_without_python_keeps_what_needs_no_streams(backend, images):
    chosen = ["files", "commands", "outputs", "quiescence", "ending everything", "snapshots", "users"]
    report = await run_contract(backend, image=images["busybox"], only=chosen)
    failed = {found.name: found.detail for found in report.failed}
    assert set(failed) <= {"users", "quiescence"}, failed
    machine = await backend.create(SandboxSpec(image=images["busybox"]))
    assert (await machine.exec("setsid sleep 973 & sleep 973", timeout_s=1)).outcome == "timeout"
    assert (await machine.exec("ps | grep -c '[s]leep 973'")).stdout == b"0\n"
    with pytest.raises(SandboxError, match="has no python3"):
        await machine.spawn("true")
    await machine.destroy()


async def test_an_image_is_built_once_and_its_own_entrypoint_does_not_end_the_container(backend, images):
    began = time.monotonic()
    await backend.prepare(images["busybox"])  # built by the test before, or now
    first = time.monotonic() - began
    began = time.monotonic()
    await backend.prepare(images["busybox"])
    assert time.monotonic() - began < max(0.5, first)
    machine = await backend.create(SandboxSpec(image=images["busybox"]))  # ENTRYPOINT ["/bin/false"]
    assert (await machine.exec("echo hi")).stdout == b"hi\n"
    await machine.destroy()


async def test_a_folder_that_cannot_be_built_says_why(backend, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY nothing /\n")
    with pytest.raises(SandboxError, match="nothing"):
        await backend.prepare(Image(dockerfile=tmp_path))
    with pytest.raises(SandboxError, match="there is no Dockerfile in"):
        await backend.prepare(Image(dockerfile=tmp_path / "none"))


async def test_memory_that_runs_out_is_told_as_such(backend, images):
    resources = Resources(memory_mib=64, pids=64)
    machine = await backend.create(SandboxSpec(image=images["python"], resources=resources))
    result = await machine.exec(["python3", "-c", "x = bytearray(300 << 20); x[::4096] = b'1' * len(x[::4096])"])
    assert (result.outcome, result.exit_code) == ("oom", None)
    assert (await machine.exec("echo on")).stdout == b"on\n"
    await machine.destroy()


async def test_a_container_ends_by_itself_when_its_time_is_over(backend, images):
    machine = await backend.create(SandboxSpec(image=images["busybox"], ttl_s=1.0))
    for _ in range(100):
        if not await machine._machine.alive():
            break
        await asyncio.sleep(0.2)
    with pytest.raises(SandboxLost):
        await machine.exec("true")
    await machine.destroy()


async def test_a_container_that_somebody_removed_is_lost(backend, images):
    machine = await backend.create(SandboxSpec(image=images["python"]))
    await backend.remove(machine.id)
    with pytest.raises(SandboxLost):
        await machine.exec("true")
    await machine.destroy()


OWNER = """
import asyncio, sys
from pathlib import Path
from miles.sandboxes.base import Image, SandboxSpec
from miles.sandboxes.providers.docker import DockerBackend
async def main():
    backend = DockerBackend(url=sys.argv[1])
    spec = SandboxSpec(image=Image(dockerfile=Path(sys.argv[2])))
    machines = [await backend.create(spec) for _ in range(2)]
    await machines[0].snapshot()
    print("ready", flush=True)
    while True:
        await backend.create(spec)
asyncio.run(main())
"""


async def test_a_killed_owners_containers_and_snapshots_are_reaped_and_no_others(backend, engine, images):
    ours = await backend.create(SandboxSpec(image=images["busybox"]))
    kept = await ours.snapshot()
    words = [sys.executable, "-c", OWNER, engine, str(images["busybox"].dockerfile)]
    owner = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert await owner.stdout.readline() == b"ready\n"
    owner.kill()
    await owner.wait()
    assert await backend.reap() >= 2
    assert [info.id for info in await backend.machines()] == [ours.id]
    again = await backend.create(SandboxSpec(image=kept))
    await again.destroy()
    await ours.destroy()
    owners = {(image["Labels"] or {}).get("miles-owner") for image in await backend._docker().images.list()}
    assert owners <= {None, backend.owner}

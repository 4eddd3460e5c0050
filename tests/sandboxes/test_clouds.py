"""The clouds' real SDKs against emulators of their services: the contract, and what goes wrong."""

import asyncio
import contextlib
import json
import os
import sys

import pytest

from miles.errors import SandboxCreateFailed, SandboxLost, SandboxUnavailable
from miles.sandboxes.base import SandboxSpec
from miles.sandboxes.contract import CHECKS, run_contract
from miles.sandboxes.pool import SandboxConfig, SandboxPool
from miles.sandboxes.providers.daytona import DaytonaBackend
from miles.sandboxes.providers.e2b import AgentEnvBackend, E2BBackend
from miles.sandboxes.providers.modal import ModalBackend
from tests.sandboxes.test_contract import kept

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the SDKs' own warnings
UNPROVEN = ("users",)  # an emulated machine has one user


@contextlib.asynccontextmanager
async def cloud(name):
    """An emulated service, and the backend that talks to it."""
    from tests.emulators import daytona, e2b, modal  # slow to import

    if name in ("e2b", "agentenv"):
        kind = E2BBackend if name == "e2b" else AgentEnvBackend
        async with e2b.E2B(old=name == "agentenv").served() as service:
            yield service, kind(api_key=e2b.KEY, url=service.url, sandbox_url=service.url)
    elif name == "daytona":
        async with daytona.Daytona().served() as service:
            backend = DaytonaBackend(api_key=daytona.KEY, url=service.url)
            yield service, backend
            await backend.close()
    else:
        async with modal.Modal().served() as service:
            yield service, ModalBackend()


async def test_e2b_agentenv_and_daytona_keep_the_contract():
    async def one(name):
        async with cloud(name) as (service, backend):
            report = await run_contract(backend, leave_out=UNPROVEN)
            assert service.machines == {}
            return report

    for report in await asyncio.gather(*map(one, ("e2b", "agentenv", "daytona"))):
        assert set(CHECKS) - kept(report) - {"time to live"} == {"users", "mounts"}


@pytest.mark.parametrize("generation", ["1", "0"], ids=["V2", "V1"])
async def test_modal_keeps_the_contract_with_both_generations_of_its_machines(generation):
    from tests.emulators import modal

    async with modal.Modal().served() as service:
        account = {"MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-1", "MODAL_SERVER_URL": service.url}
        words = ["sandbox", "test", "modal", "--json"]
        words += ["--without", "users"]
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "miles.cli.main", *words),
            env={**os.environ, **account, "MODAL_SANDBOX_V2": generation},
            stdout=asyncio.subprocess.PIPE,
        )
        told = json.loads((await child.communicate())[0])
    assert [found for found in told["checks"] if found["status"] == "failed"] == []
    assert (child.returncode, told["failed"]) == (0, 0)
    left_out = {found["name"] for found in told["checks"] if found["status"] != "ok"}
    assert left_out == {"users", "mounts"}  # a cloud cannot show folders of this host


@pytest.mark.parametrize("name", ["e2b", "daytona"])
async def test_what_a_service_answers_says_whether_to_try_again(name):
    async with cloud(name) as (service, backend):
        service.faults += [429] * 8  # SDKs try again by themselves, too
        with pytest.raises(SandboxCreateFailed):
            await backend.create(SandboxSpec())
        service.faults.clear()
        pool = SandboxPool(backend, SandboxConfig(create_retries=3))
        service.faults += [503]
        async with pool.sandbox(SandboxSpec()) as machine:
            assert (await machine.exec("echo up")).stdout == b"up\n"
            await service.kill(machine.id)
            with pytest.raises(SandboxLost):
                await machine.exec("echo up")
        await pool.close()
        assert service.machines == {}


async def test_a_wrong_key_and_a_missing_one_are_told():
    async with cloud("e2b") as (service, _), cloud("daytona") as (other, _):
        with pytest.raises(SandboxUnavailable, match="look at the key"):
            await E2BBackend(api_key="e2b_" + "1" * 40, url=service.url).probe()
        wrong = DaytonaBackend(api_key="no", url=other.url)
        with pytest.raises(SandboxUnavailable, match="look at the key"):
            await wrong.probe()
        await wrong.close()
    for backend, key in ((E2BBackend(), "E2B_API_KEY"), (DaytonaBackend(), "DAYTONA_API_KEY")):
        with pytest.raises(SandboxUnavailable, match=f"set {key}"):
            await backend.probe()
    with pytest.raises(SandboxUnavailable, match="set AGENTENV_URL"):
        await AgentEnvBackend(api_key="k").probe()


async def test_a_creation_that_nobody_waits_for_leaves_no_machine():
    async with cloud("e2b") as (service, backend):
        service.slow_s = 0.3
        pool = SandboxPool(backend, SandboxConfig(create_timeout_s=0.1, create_retries=0))
        with pytest.raises(SandboxCreateFailed, match=r"no sandbox after 0\.1 s"):
            async with pool.sandbox(SandboxSpec()):
                pass
        await pool.close()
        assert service.machines == {}


async def test_a_service_of_the_older_route_is_asked_by_it_from_then_on():
    async with cloud("agentenv") as (service, backend):
        for _ in range(2):
            machine = await backend.create(SandboxSpec(ttl_s=77))
            assert (await machine.exec("id -u; pwd")).stdout == b"1000\n/workspace\n"
            await machine.destroy()
        made = [asked for asked in service.asked if asked.startswith("POST")]
        assert made == ["POST /v2/sandboxes", "POST /sandboxes", "POST /sandboxes"]


async def test_machines_that_are_used_are_kept_alive():
    async with cloud("e2b") as (service, backend):
        pool = SandboxPool(backend, SandboxConfig(ttl_s=2.0))
        await pool.start()
        async with pool.sandbox(SandboxSpec()) as machine:
            await asyncio.sleep(3.0)
            assert (await machine.exec("echo up")).stdout == b"up\n"
            service.machines[machine.id].ends_at = 0.0
            with pytest.raises(SandboxLost):
                await machine.exec("true")
        await pool.close()


FILES = """
import json, sys
import modal
from modal.exception import SandboxFilesystemNotFoundError

app = modal.App.lookup("files", create_if_missing=True)
machine = modal.Sandbox.create(app=app, image=modal.Image.from_registry("any"))
files = machine.filesystem
files.write_bytes(b"\\x00\\xff" * 400_000, "/workspace/deep/data")
files.make_directory("/workspace/a/b")
told = [len(files.read_bytes("/workspace/deep/data")), [(e.name, e.type.value) for e in files.list_files("/workspace")]]
told.append(files.stat("/workspace/deep/data").size)
files.remove("/workspace/deep", recursive=True)
try:
    files.read_bytes("/workspace/deep/data")
except SandboxFilesystemNotFoundError:
    told.append("gone")
machine.terminate()
print(json.dumps(told))
"""


async def test_the_emulated_machines_have_modals_file_system_tools():
    from tests.emulators import modal

    async with modal.Modal().served() as service:
        account = {"MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-1", "MODAL_SERVER_URL": service.url}
        words, env = [sys.executable, "-c", FILES], {**os.environ, **account}
        child = await asyncio.create_subprocess_exec(*words, env=env, stdout=asyncio.subprocess.PIPE)
        told = json.loads((await child.communicate())[0])
    assert told == [800_000, [["a", "directory"], ["deep", "directory"]], 800_000, "gone"]

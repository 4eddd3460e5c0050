"""The local backend: what the contract does not say of it, and plain processes where isolation is not wanted."""

import asyncio
import concurrent.futures.thread  # noqa: F401  a fork without privilege may be unable to read it later
import contextlib
import os
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path

import pytest

from miles.errors import SandboxCreateFailed, SandboxError, SandboxLost, SandboxUnavailable
from miles.processes import owner_mark
from miles.sandboxes.base import Resources, SandboxSpec
from miles.sandboxes.local.backend import LocalBackend
from miles.sandboxes.local.reaper import processes_with, reap
from miles.sandboxes.local.unisolated import UnisolatedSandbox

SPEC = SandboxSpec(files={"/workspace/note": b"key 42", "/workspace/deep/er": b"x"})


@pytest.fixture
async def sandbox():
    backend = LocalBackend()
    assert (await backend.probe()).isolation == "process"
    machine = await backend.create(SPEC)
    yield machine
    await machine.destroy()


@pytest.fixture
async def machine():
    """Plain processes; the isolated ones keep the contract (test_contract.py)."""
    made = UnisolatedSandbox(SPEC)
    yield made
    await made.destroy()


async def test_files_are_there_before_the_first_command(machine):
    result = await machine.exec("cat note deep/er")
    assert (result.exit_code, result.stdout, result.outcome, result.truncated) == (0, b"key 42x", "exited", False)


async def test_a_failure_is_a_value(machine):
    result = await machine.exec("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")


async def test_files_and_background_processes_live_as_long_as_the_episode(machine):
    await machine.exec("echo one > kept; sleep 50 & echo $! > pid")
    result = await machine.exec("cat kept; kill -0 $(cat pid) && echo alive")
    assert result.stdout == b"one\nalive\n"


async def test_quiesce_ends_what_commands_left_running(machine):
    await machine.exec("(trap '' TERM; setsid sleep 50) & echo $! > pid; sleep 51 &")
    await machine.quiesce()
    assert (await machine.exec("ps ax | grep -c '[s]leep 5[01]'")).stdout in (b"0\n", b"")


async def test_standard_input_directory_and_environment(machine):
    result = await machine.exec(
        ["sh", "-c", "cat; pwd; echo $A"], stdin=b"typed\n", cwd="/workspace/deep", env={"A": "b"}
    )
    typed, directory, variable = result.text.split()
    assert (typed, variable) == ("typed", "b")
    assert directory.endswith("deep")


async def test_a_timeout_kills_the_command_and_its_grandchildren(machine):
    began = time.monotonic()
    result = await machine.exec(
        "setsid sh -c 'trap \"\" TERM; sleep 987' & echo begun; sleep 987; touch late", timeout_s=0.5
    )
    assert (result.outcome, result.exit_code, result.stdout) == ("timeout", None, b"begun\n")
    assert time.monotonic() - began < 4
    after = await machine.exec("ls late; ps ax | grep -c '[s]leep 987'; echo alive")
    assert after.stdout.endswith(b"0\nalive\n")


async def test_cancelling_the_caller_kills_the_command(machine):
    task = asyncio.create_task(machine.exec("sleep 986"))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await machine.exec("ps ax | grep -c '[s]leep 986'")).stdout == b"0\n"


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5", None, True])
async def test_a_timeout_must_be_a_positive_number(machine, timeout):
    with pytest.raises(ValueError, match="timeout_s must be"):
        await machine.exec("true", timeout_s=timeout)


async def test_binary_and_endless_output(machine):
    result = await machine.exec("printf 'ok\\377\\376\\000end'")
    assert result.stdout == b"ok\xff\xfe\x00end"
    assert result.text == "ok\ufffd\ufffd\x00end"
    flood = await machine.exec("head -c 50000000 /dev/zero", max_output=1000)
    assert flood.truncated
    assert len(flood.stdout) < 1100


async def test_read_and_write(machine):
    await machine.write("/workspace/new/file", b"\x00\xff" * 1000)
    assert await machine.read("/workspace/new/file") == b"\x00\xff" * 1000
    with pytest.raises(FileNotFoundError):
        await machine.read("/workspace/none")
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        await machine.read("/workspace/new/file", max_bytes=10)


async def test_nothing_of_the_host_is_visible(sandbox):
    assert (await sandbox.exec(f"cat {__file__}")).exit_code != 0
    processes = (await sandbox.exec("ps -e -o pid=")).stdout.split()
    assert len(processes) <= 7
    assert str(os.getpid()).encode() not in processes
    environment = (await sandbox.exec("env")).text
    assert "HOME=/workspace" in environment
    assert "PYTEST" not in environment


async def test_labels_say_whose_machine_it_is():
    sandbox = await LocalBackend().create(SandboxSpec(labels={"episode": "g1/0.0"}))
    assert processes_with('MILES_LABELS={"episode": "g1/0.0"}') != []
    assert "MILES_LABELS" not in (await sandbox.exec("env")).text
    await sandbox.destroy()


async def test_there_is_no_network(sandbox):
    assert (await sandbox.exec("cat /proc/net/route")).stdout.count(b"\n") == 1
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
    result = await sandbox.exec(["python3", "-c", script])
    assert b"Network is unreachable" in result.stderr


async def test_the_system_is_read_only_and_privileges_are_gone(sandbox):
    assert b"Read-only" in (await sandbox.exec("touch /usr/x")).stderr
    assert (await sandbox.exec("mount -t tmpfs none /tmp")).exit_code != 0
    assert "CapEff:\t0000000000000000" in (await sandbox.exec("cat /proc/self/status")).text


async def test_memory_processes_and_disk_are_limited():
    backend = LocalBackend()
    hard = (await backend.probe()).limits == "hard"
    spec = SandboxSpec(resources=Resources(memory_mib=256, pids=32, disk_mib=4))
    sandbox = await backend.create(spec)
    hog = await sandbox.exec(["python3", "-c", "x = bytearray(900 << 20); x[::4096] = b'1' * len(x[::4096])"])
    assert hog.outcome == "oom" if hard else b"MemoryError" in hog.stderr
    big = await sandbox.exec("head -c 8000000 /dev/zero > big")
    assert big.exit_code != 0
    if hard:
        bomb = await sandbox.exec("for i in $(seq 100); do sleep 20 & done; echo done", timeout_s=5)
        assert b"fork" in bomb.stderr.lower()
    await sandbox.destroy()


async def test_a_dead_sandbox_is_lost_not_a_command_that_failed(sandbox):
    os.kill(sandbox._machine._init_pid, 9)
    await asyncio.sleep(0.1)
    with pytest.raises(SandboxLost, match="fresh one"):
        await sandbox.exec("echo hi")
    await sandbox.destroy()


async def test_network_access_is_refused_with_a_way_out():
    with pytest.raises(SandboxError, match="choose another backend"):
        await LocalBackend().create(SandboxSpec(network="full"))


async def test_a_sandbox_that_cannot_start_says_why():
    with pytest.raises(SandboxCreateFailed, match="bwrap ended with status"):
        await LocalBackend().create(SandboxSpec(files={"/usr/not/writable": b""}))
    assert not processes_with(f"MILES_OWNER={owner_mark()}")


async def test_without_isolation_nothing_runs_unless_it_is_wanted(monkeypatch):
    monkeypatch.setattr("miles.sandboxes.local.backend._find_bwrap", lambda: None)
    with pytest.raises(SandboxUnavailable, match=r"bubblewrap .* is missing.*allow_unisolated=true"):
        await LocalBackend().probe()
    backend = LocalBackend(allow_unisolated=True)
    assert (await backend.probe()).isolation == "none"
    sandbox = await backend.create(SPEC)
    assert (await sandbox.exec("cat note")).stdout == b"key 42"
    await sandbox.destroy()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('echo "bubblewrap 0.8.0"', "is bubblewrap 0.8.0; 0.11 or newer is needed"),
        ("exit 1", "of unknown version"),
        (
            'test "$1" = --version && echo "bubblewrap 0.11.0" && exit; echo "No permissions" >&2; exit 1',
            r"user namespaces do not work here \(No permissions.*max_user_namespaces.*apparmor.*Docker",
        ),
    ],
)
async def test_a_host_that_cannot_isolate_is_told_what_to_change(monkeypatch, tmp_path, answer, message):
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{answer}\n")
    fake.chmod(0o755)
    monkeypatch.setattr("miles.sandboxes.local.backend._find_bwrap", lambda: str(fake))
    with pytest.raises(SandboxUnavailable, match=message):
        await LocalBackend().probe()


async def test_without_nsenter_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SandboxUnavailable, match="nsenter is missing \\(install util-linux\\)"):
        await LocalBackend().probe()


async def test_without_control_groups_memory_and_files_are_limited_by_rlimit(monkeypatch):
    monkeypatch.setattr("miles.sandboxes.local.backend.cgroup_root", tuple)
    backend = LocalBackend()
    assert (await backend.probe()).limits == "best_effort"
    sandbox = await backend.create(SandboxSpec(resources=Resources(memory_mib=256, disk_mib=4)))
    hog = await sandbox.exec(["python3", "-c", "x = bytearray(900 << 20)"])
    assert b"MemoryError" in hog.stderr
    big = await sandbox.exec("head -c 8000000 /dev/zero > big")
    assert big.exit_code != 0
    await sandbox.destroy()


OWNER = """
import asyncio, json
from miles.sandboxes.base import SandboxSpec
from miles.sandboxes.local.backend import LocalBackend
async def main():
    backend = LocalBackend()
    boxes = [await backend.create(SandboxSpec()) for _ in range(3)]
    for box in boxes:
        await box.exec("setsid sleep 985 & true")
    print("ready", flush=True)
    for _ in range(1000):
        await backend.create(SandboxSpec())
asyncio.run(main())
"""


def test_a_killed_owner_leaves_nothing_after_the_next_reap():
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNER)], stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"ready\n"
    mark = f"MILES_OWNER={owner.pid}-"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    backend = LocalBackend()
    asyncio.run(backend.reap())
    deadline = time.monotonic() + 5
    while _with_prefix(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _with_prefix(mark) == []
    assert reap(backend._cgroups) == 0
    assert [g for root in backend._cgroups for g in root.glob(f"{owner.pid}-*")] == []


def _with_prefix(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


ASK = "import socket,sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).makefile().read())"


@contextlib.asynccontextmanager
async def greeter():
    """Something of this host that says hello; what opens a connection to it."""

    async def greet(reader, writer):
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        yield lambda: asyncio.open_connection(*address)


async def _as_an_ordinary_user():
    backend = LocalBackend()
    assert (await backend.probe()).limits == "best_effort"
    sandbox = await backend.create(SPEC)
    result = await sandbox.exec("cat note; touch new && id -u; grep CapEff /proc/self/status")
    assert result.stdout == b"key 421000\nCapEff:\t0000000000000000\n"
    assert (await sandbox.exec("sleep 984 & sleep 984", timeout_s=0.3)).outcome == "timeout"
    await sandbox.exec("setsid sleep 984 & true")
    await sandbox.quiesce()
    async with greeter() as connect:
        port = await sandbox.reach(connect)
        assert (await sandbox.exec(["python3", "-c", ASK, str(port)])).stdout == b"hello\n"
    assert (await sandbox.exec("ps ax | grep -c '[s]leep 984'")).stdout == b"0\n"
    await sandbox.destroy()


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_ordinary_user_needs_no_privilege(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as sink:
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setgid(4242)
                os.setuid(4242)
                asyncio.new_event_loop().run_until_complete(_as_an_ordinary_user())
                os._exit(0)
            except BaseException:  # noqa: BLE001  the fork must end here, whatever happened
                traceback.print_exc(file=sink)
                sink.flush()
            finally:
                os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0, log.read_text()

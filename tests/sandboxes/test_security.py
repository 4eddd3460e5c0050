"""Ways out of a local sandbox that have been taken elsewhere, and are closed here."""

import asyncio
import os
import socket
import subprocess

import pytest

from miles.processes import machine_tag, owner_mark
from miles.sandboxes.base import Image, SandboxSpec
from miles.sandboxes.local.backend import LocalBackend
from miles.sandboxes.local.rootfs import _delete
from tests.emulators.images import busybox_root, python_root
from tests.sandboxes.test_local import ASK, greeter


@pytest.fixture
async def machine():
    made = await LocalBackend().create(SandboxSpec())
    yield made
    await made.destroy()


async def python(machine, code):
    return await machine.exec(["python3", "-c", code])


@pytest.mark.parametrize(
    "command",
    [
        "mount -t proc none /workspace",
        "mount --bind / /workspace",
        "umount /proc/sys",
        "mount -o remount,rw /usr",
        "unshare -m mount -t tmpfs none /usr",
        "cat /proc/sys/kernel/hostname && echo other > /proc/sys/kernel/hostname",
        "echo b > /proc/sysrq-trigger",
        "mknod /workspace/disk b 8 0",
        "chroot /workspace /bin/true",
        "hostname other",
        "ip link add dummy0 type dummy",
        "unshare -Ur true",
    ],
)
async def test_neither_mounts_nor_the_kernels_switches_can_be_changed(machine, command):
    result = await machine.exec(command)
    assert result.exit_code != 0, result


async def test_no_switch_of_the_kernel_can_be_opened_for_writing(tmp_path):
    for image in (None, Image(rootfs=python_root(tmp_path / "root"))):  # the second is root's own
        made = await LocalBackend().create(SandboxSpec(image=image))
        code = """
import os
for folder, _, names in os.walk('/proc/sys'):
    for name in names:
        try:
            os.close(os.open(os.path.join(folder, name), os.O_WRONLY))
            print('opened', folder, name)
        except OSError:
            pass
for name in ('sysrq-trigger', 'kcore', 'kallsyms', 'keys'):
    try:
        assert not open('/proc/' + name).read(1), name
    except OSError:
        pass
"""
        result = await made.exec(["python3", "-c", code])
        await made.destroy()
        assert (result.exit_code, result.stdout) == (0, b""), result


async def test_there_are_no_host_folders_devices_or_control_groups(machine):
    listed = (await machine.exec("ls /; ls /dev; ls /sys/fs/cgroup 2>&1; ls /etc")).text.split()
    assert {"home", "root", "var", "run", "boot", "sda", "mem", "kvm", "shadow"}.isdisjoint(listed)


async def test_nobody_gains_rights_by_programs_that_give_them(machine):
    told = (await machine.exec("grep -E 'NoNewPrivs|CapEff|CapPrm' /proc/self/status")).text.split()
    assert told == ["CapPrm:", "0000000000000000", "CapEff:", "0000000000000000", "NoNewPrivs:", "1"]
    assert (await machine.exec("su root -c id; sudo id; passwd root; chsh root", stdin=b"\n")).exit_code != 0
    assert (await machine.exec("cp /bin/sh sh; chmod u+s sh; ./sh -p -c 'id -u'")).stdout.strip() in (b"1000", b"")


async def test_the_hosts_processes_can_be_neither_seen_nor_signalled_nor_traced(machine):
    victim = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    try:
        for command in (f"kill -0 {victim.pid}", f"cat /proc/{victim.pid}/status", f"ls /proc/{victim.pid}/root/"):
            assert (await machine.exec(command)).exit_code != 0
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


async def test_what_runs_the_commands_cannot_be_read_written_or_traced(machine):
    code = """
import os
others = [p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]
others = [p for p in others if b"d=b''" in open('/proc/%s/cmdline' % p, 'rb').read()]
tried = 0
for pid in others:
    for name, mode in (('fd/1', 'wb'), ('mem', 'rb'), ('environ', 'rb')):
        try:
            open('/proc/%s/%s' % (pid, name), mode).close()
        except (PermissionError, FileNotFoundError, OSError) as error:
            tried += 1
            continue
        print('opened', pid, name)
print(len(others) > 0, tried)
"""
    await machine.spawn("true")  # so that there is one
    result = await python(machine, code)
    assert result.stdout.split()[0] == b"True", result
    assert b"opened" not in result.stdout


async def test_sockets_without_a_file_do_not_cross(machine):
    with socket.socket(socket.AF_UNIX) as host:
        host.bind(f"\0miles-test-{os.getpid()}")
        host.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0miles-test-{os.getpid()}')"
        assert (await python(machine, code)).exit_code != 0


async def test_of_the_network_only_what_was_opened_is_reachable(machine):
    async with greeter() as connect:
        _, writer = await connect()
        own = writer.get_extra_info("peername")[1]
        writer.close()
        port = await machine.reach(connect)
        assert (await machine.exec(["python3", "-c", ASK, str(port)])).stdout == b"hello\n"
        assert (await machine.exec(["python3", "-c", ASK, str(own)])).exit_code != 0
    for address in ("('192.0.2.1', 80)", "('127.0.0.1', 22)"):
        code = f"import socket; socket.create_connection({address}, 2)"
        assert (await python(machine, code)).exit_code != 0
    raw = "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"
    assert b"PermissionError" in (await python(machine, raw)).stderr


async def test_secrets_are_in_no_command_line(machine):
    running = await machine.spawn("sleep 5", env={"API_KEY": "sk-hidden"})
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout  # noqa: ASYNC221
    assert "sk-hidden" not in shown
    assert "sk-hidden" not in (await machine.exec("ps -eo args")).text
    await running.kill()
    await running.wait()


async def test_links_in_the_sandbox_lead_nowhere_on_the_host(machine, tmp_path):
    (tmp_path / "secret").write_text("hidden")
    await machine.exec(f"ln -s {tmp_path}/secret link; ln -s /proc/1/root/etc/shadow other")
    with pytest.raises(FileNotFoundError):
        await machine.read("/workspace/link")
    await machine.write("/workspace/new", b"x")
    await machine.exec(f"ln -s {tmp_path}/made made")
    with pytest.raises(OSError, match="cannot write"):
        await machine.write("/workspace/made/file", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


async def test_files_of_a_task_do_not_follow_an_images_links_to_the_host(tmp_path):
    (tmp_path / "victim").write_text("mine")
    root = busybox_root(tmp_path / "root")
    (root / "workspace" / "note").symlink_to(f"/oldroot{tmp_path}/victim")
    (root / "out").symlink_to(f"/oldroot{tmp_path}")
    spec = {"files": {"/workspace/note": b"overwritten"}, "image": Image(rootfs=root)}
    with pytest.raises(OSError, match="cannot write"):
        await LocalBackend().create(SandboxSpec(**spec))
    made = await LocalBackend().create(SandboxSpec(image=Image(rootfs=root), workdir="/out/made"))
    await made.destroy()
    assert (tmp_path / "victim").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "victim"]


async def test_variables_of_a_task_reach_its_commands_and_no_program_of_the_host(tmp_path):
    image = Image(rootfs=busybox_root(tmp_path / "root"))
    env = {"LD_PRELOAD": "/nowhere.so", "QUOTED": 'it\'s "here"\n$HOME'}
    made = await LocalBackend().create(SandboxSpec(image=image, env=env))
    result = await made.exec('echo "$LD_PRELOAD|$QUOTED"')
    assert (result.stdout, result.stderr) == (b'/nowhere.so|it\'s "here"\n$HOME\n', b"")
    await made.destroy()


async def test_clearing_up_follows_no_links(tmp_path):
    (tmp_path / "host").mkdir(mode=0o755)
    tree = tmp_path / "tree"
    (tree / "locked").mkdir(parents=True)
    (tree / "locked" / "file").write_text("x")
    (tree / "link").symlink_to(tmp_path / "host")
    (tree / "locked").chmod(0)
    _delete(tree)
    assert not tree.exists()
    assert (tmp_path / "host").stat().st_mode & 0o777 == 0o755


async def test_the_reaper_judges_owners_of_this_machine_only():
    marks = (f"1-1@{machine_tag()}", "1-1@another", owner_mark())
    processes = [await asyncio.create_subprocess_exec("sleep", "60", env={"MILES_OWNER": mark}) for mark in marks]
    await LocalBackend().reap()
    assert await asyncio.wait_for(processes[0].wait(), 5) == -9
    assert [process.returncode for process in processes[1:]] == [None, None]
    for process in processes[1:]:
        process.kill()
        await process.wait()


@pytest.mark.slow
async def test_a_command_that_ends_whatever_it_can_does_not_cost_the_episode(machine):
    await machine.spawn("true")  # so that there is a process inside
    result = await machine.exec("(while :; do pkill -9 python3; done) & sleep 0.5", timeout_s=20)
    assert result.outcome == "signal"
    await machine.quiesce()
    assert (await machine.exec("echo on")).stdout == b"on\n"
    await machine.exec("kill -STOP -1", timeout_s=1)
    await machine.quiesce()
    assert (await machine.exec("echo on")).stdout == b"on\n"

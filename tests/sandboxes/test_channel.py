"""The process inside and the host's side of it, without a sandbox around."""

import ast
import asyncio
import contextlib
import os
import signal
import sys

import pytest

from miles.errors import SandboxLost
from miles.sandboxes.children import ChildPipe
from miles.sandboxes.inside.channel import Channel, ChannelLost
from miles.sandboxes.inside.guest import GUEST


@pytest.fixture(params=["bytes", "text"])
async def channel(request):
    words = ["text"] if request.param == "text" else []
    pipe = await ChildPipe([sys.executable, "-c", GUEST, *words], env={"PATH": os.environ["PATH"]}).start()
    made = Channel(pipe, text=bool(words))
    made.hello = await made.start()
    yield made
    await made.close()


def test_the_process_inside_needs_python_3_6_and_the_standard_library_only():
    tree = ast.parse(GUEST, feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    assert not any("walrus" in type(node).__name__ or isinstance(node, ast.NamedExpr) for node in ast.walk(tree))


async def test_many_commands_at_once_get_their_own_answers(channel):
    results = await asyncio.gather(
        *(channel.run(["sh", "-c", f"cat; echo {n} >&2; exit {n}"], timeout_s=20, stdin=b"x" * n) for n in range(40))
    )
    for n, result in enumerate(results):
        assert (result.exit_code, result.stdout, result.stderr) == (n, b"x" * n, f"{n}\n".encode())


async def test_large_inputs_and_outputs_pass_whole(channel):
    data = os.urandom(1 << 20) * 3
    result = await channel.run(["cat"], timeout_s=30, stdin=data, max_output=1 << 23)
    assert result.stdout == data
    process = await channel.spawn(["cat"])
    received = bytearray()

    async def take():
        async for _, part in process.output():
            received.extend(part)

    taking = asyncio.create_task(take())
    await process.write(data)
    await process.end_input()
    await taking
    assert (bytes(received), process.exit_code) == (data, 0)


async def test_an_output_that_nobody_takes_holds_its_command_up_and_nothing_else(channel):
    process = await channel.spawn(["sh", "-c", "head -c 30000000 /dev/zero; echo over >&2"])
    assert (await channel.run(["echo", "hi"], timeout_s=10)).stdout == b"hi\n"
    names = [name async for name, _ in process.output()]
    assert names[-1] == "stderr"


async def test_a_signal_reaches_a_command_that_has_only_just_been_started(channel):
    process = await channel.spawn(["sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.05; done"])
    await asyncio.sleep(0.2)
    await process.kill(signal.SIGTERM)
    assert await process.wait() == 7
    process = await channel.spawn(["sleep", "979"])
    await process.kill()
    assert await process.wait() == -9


async def test_files_errors_are_those_of_the_system(channel, tmp_path):
    await channel.put(str(tmp_path / "new" / "file"), b"x" * 200_000, 0o755)
    assert (tmp_path / "new" / "file").stat().st_mode & 0o777 == 0o755
    assert await channel.get(str(tmp_path / "new" / "file"), 1 << 20) == b"x" * 200_000
    with pytest.raises(FileNotFoundError):
        await channel.get(str(tmp_path / "none"), 10)
    with pytest.raises(IsADirectoryError):
        await channel.get(str(tmp_path), 10)
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        await channel.get(str(tmp_path / "new" / "file"), 10)
    with pytest.raises(FileExistsError):
        await channel.put(str(tmp_path / "new" / "file" / "under"), b"")


async def test_hanging_up_ends_everything_that_was_started(channel):
    await channel.run(["sh", "-c", "setsid sleep 978 & env -i setsid sleep 977 &"], timeout_s=10)
    await channel.close()
    with pytest.raises(SandboxLost):
        await channel.run(["true"], timeout_s=1)
    for _ in range(100):
        left = [name for name in os.listdir("/proc") if name.isdigit() and runs(name, b"sleep\x0097")]
        if not left:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(left)


def runs(pid, words):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return file.read().startswith(words)
    except OSError:
        return False


async def test_when_the_process_inside_is_killed_callers_are_told(channel):
    running = asyncio.create_task(channel.run(["sleep", "976"], timeout_s=60))
    await asyncio.sleep(0.2)
    os.kill(channel.hello["pid"], signal.SIGKILL)
    with pytest.raises(ChannelLost, match="has ended"):
        await running
    os.system("pkill -f 'sleep 976'")  # noqa: ASYNC221  its group was not this test's to end


class Noisy:
    """A pipe that carries text only, echoes what is written and adds lines of its own."""

    def __init__(self, pipe):
        self.pipe, self.echo = pipe, []

    async def read(self):
        data = await self.pipe.read()
        words, self.echo = b"".join(self.echo), []
        return words + data if data.startswith(b">") else data

    async def write(self, data):
        self.echo.append(b"\nwelcome to the machine\n" + (data if data.startswith(b"<") else b""))
        await self.pipe.write(data)

    async def close(self):
        await self.pipe.close()


async def test_lines_that_are_not_of_the_channel_do_not_disturb_it():
    pipe = await ChildPipe([sys.executable, "-c", GUEST, "text"], env={"PATH": os.environ["PATH"]}).start()
    channel = Channel(Noisy(pipe), text=True)
    await channel.start()
    for n in range(5):
        assert (await channel.run(["echo", str(n)], timeout_s=10)).stdout == f"{n}\n".encode()
    await channel.close()


async def test_a_process_that_says_nothing_is_not_waited_for():
    pipe = await ChildPipe(["sleep", "975"], env={"PATH": os.environ["PATH"]}).start()
    channel = Channel(pipe)
    with pytest.raises(ChannelLost, match=r"said nothing for 0\.2 s"):
        await channel.start(0.2)
    await channel.close()
    pipe = await ChildPipe(["false"], env={"PATH": os.environ["PATH"]}).start()
    channel = Channel(pipe)
    with pytest.raises(ChannelLost, match="ended at its start"):
        await channel.start(5)
    await channel.close()


async def test_a_reader_that_comes_and_goes_loses_no_room(channel):
    process = await channel.spawn(["cat"])
    for n in range(60):
        await process.write(bytes([n]) * 50_000)
        received = 0
        while received < 50_000:
            async for _, part in process.output():
                received += len(part)
                break
    await process.end_input()
    assert await process.wait() == 0


async def test_input_for_what_has_ended_is_refused_not_waited_for(channel):
    process = await channel.spawn(["sh", "-c", "exec < /dev/null; sleep 0.2"])
    async with asyncio.timeout(10):
        with contextlib.suppress(BrokenPipeError):
            for _ in range(100):
                await process.write(b"x" * 200_000)
                await asyncio.sleep(0.01)
            raise AssertionError("everything was taken")
        assert await process.wait() == 0


async def test_one_may_wait_while_another_reads(channel):
    process = await channel.spawn(["sh", "-c", "sleep 0.2; echo hi; exit 5"])
    waiting = asyncio.create_task(process.wait())
    seen = [part async for part in process.output()]
    assert await asyncio.wait_for(waiting, 5) == 5
    assert seen in ([("stdout", b"hi\n")], [])


async def test_a_command_that_ends_its_supervisor_ends_with_all_it_started(channel):
    async with asyncio.timeout(8):
        result = await channel.run(["sh", "-c", "setsid sleep 972 & kill -9 $PPID; sleep 971"], timeout_s=60)
    assert result.outcome == "signal"
    assert not [name for name in os.listdir("/proc") if name.isdigit() and runs(name, b"sleep\x0097")]
    assert (await channel.run(["echo", "on"], timeout_s=5)).stdout == b"on\n"


async def test_what_only_looks_like_a_file_is_not_waited_for(channel, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    async with asyncio.timeout(5):
        with pytest.raises(OSError, match="regular"):
            await channel.get(str(tmp_path / "pipe"), 10)
        with pytest.raises(OSError, match=r"No such device|regular"):
            await channel.put(str(tmp_path / "pipe"), b"x")

"""What every sandbox must do, checked against a live backend: `miles sandbox test BACKEND`.

A check gets a fresh sandbox and asserts; those for what a backend says it cannot do are left out, and told.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miles.errors import SandboxError, SandboxLost
from miles.sandboxes.base import Backend, Capabilities, Image, Resources, Sandbox, SandboxSpec

__all__ = ["CHECKS", "Found", "Report", "run_contract"]

_SECRET = "MILES_CONTRACT_SECRET"
_RESOURCES = Resources(memory_mib=256, pids=64, disk_mib=64)


@dataclass(frozen=True, slots=True)
class Found:
    """One check's outcome: `ok`, `failed` or `left out`, with the reason."""

    name: str
    status: str
    seconds: float = 0.0
    detail: str = ""


@dataclass(slots=True)
class Report:
    """What `run_contract` found."""

    backend: str
    capabilities: Capabilities
    checks: list[Found] = field(default_factory=list)
    latencies_ms: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> list[Found]:
        return [found for found in self.checks if found.status == "failed"]


class Bench:
    """What a check may use: sandboxes of the backend, destroyed when it ends."""

    def __init__(self, backend: Backend, capabilities: Capabilities, image: Image | None) -> None:
        self.backend, self.capabilities = backend, capabilities
        self.spec = SandboxSpec(image=image, resources=_RESOURCES, labels={"miles": "contract"})

    @asynccontextmanager
    async def sandbox(self, **changes: Any) -> AsyncIterator[Sandbox]:
        made = await self.backend.create(replace(self.spec, **changes))
        try:
            yield made
        finally:
            await made.destroy()


Check = Callable[[Bench], Awaitable[None]]
CHECKS: dict[str, tuple[Check, Callable[[Capabilities], bool]]] = {}
"""Name -> (check, whether a backend with these capabilities must pass it)."""


def check(needs: Callable[[Capabilities], bool] = lambda found: True) -> Callable[[Check], Check]:
    """Add a check to the contract."""

    def add(function: Check) -> Check:
        CHECKS[function.__name__.replace("_", " ")] = (function, needs)
        return function

    return add


def expect(true: object, otherwise: object = "") -> None:
    """As assert, also with `python -O`."""
    if not true:
        raise AssertionError(str(otherwise))


@check()
async def files(bench: Bench) -> None:
    """Those of the spec are there first; others are read and written exactly; what is missing is told."""
    async with bench.sandbox(files={"/workspace/note": b"key 42", "/workspace/deep/er": b"\xff\x00"}) as machine:
        first = await machine.exec("cat note; pwd")
        expect(first.text.startswith("key 42") and first.text.rstrip().endswith("/workspace"), first)
        expect(await machine.read("/workspace/deep/er") == b"\xff\x00")
        await machine.write("/tmp/new/file", b"\x00\xff" * 5000)
        expect(await machine.read("/tmp/new/file") == b"\x00\xff" * 5000)
        for path, error in (("/workspace/none", FileNotFoundError), ("/tmp/new/file", ValueError)):
            try:
                await machine.read(path, max_bytes=10)
            except error:
                continue
            raise AssertionError(f"reading {path} did not raise {error.__name__}")


@check(needs=lambda found: found.mounts)
async def mounts(bench: Bench) -> None:
    """A folder of this host, also one that others may not walk to, is seen inside and cannot be changed there."""
    with tempfile.TemporaryDirectory(prefix="miles-contract-") as folder:
        (shown := Path(folder) / "shown").mkdir()
        (shown / "note").write_text("from outside")
        async with bench.sandbox(mounts={"/opt/shown": shown}) as machine:
            seen = await machine.exec("cat /opt/shown/note; echo x > /opt/shown/more || echo refused")
            expect("from outside" in seen.text and "refused" in seen.text, seen)
        expect([path.name for path in shown.iterdir()] == ["note"])


@check()
async def large_files(bench: Bench) -> None:
    """16 MiB there and back."""
    data = os.urandom(1 << 16) * 256
    async with bench.sandbox() as machine:
        await machine.write("/workspace/large", data)
        expect(await machine.read("/workspace/large", max_bytes=1 << 25) == data)


@check()
async def commands(bench: Bench) -> None:
    """A failure is a value; streams are apart; input, directory and environment arrive; what cannot start says why."""
    async with bench.sandbox(env={"FIXED": "f"}) as machine:
        result = await machine.exec("echo out; echo err >&2; exit 7")
        expect((result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n"), result)
        await machine.exec("mkdir -p deep")
        asked = ["sh", "-c", "cat; pwd; echo $A $FIXED"]
        result = await machine.exec(asked, stdin=b"typed\n", cwd="/workspace/deep", env={"A": "b"})
        expect(result.stdout == b"typed\n/workspace/deep\nb f\n", result)
        result = await machine.exec(["/no/such/program"])
        expect(result.exit_code in (126, 127) and result.text, result)


@check()
async def outputs(bench: Bench) -> None:
    """Bytes that are no text pass; a flood is cut in the middle and the command goes on; so does one long line."""
    async with bench.sandbox() as machine:
        result = await machine.exec("printf 'ok\\377\\376\\000end'")
        expect(result.stdout == b"ok\xff\xfe\x00end", result)
        began = time.monotonic()
        result = await machine.exec("head -c 20000000 /dev/zero; echo over", max_output=10_000)
        expect(result.truncated and result.exit_code == 0, result.outcome)
        expect(len(result.stdout) < 11_000 and result.stdout.endswith(b"over\n"))
        expect(time.monotonic() - began < 30, "a flood of 20 MB took more than 30 s")


@check()
async def timeouts(bench: Bench) -> None:
    """The command and all that it started end with it, whatever they did to get away; the sandbox goes on."""
    async with bench.sandbox() as machine:
        began = time.monotonic()
        away = "setsid sh -c 'trap \"\" TERM INT HUP; sleep 987' & env -i /bin/sh -c 'sleep 986' & "
        result = await machine.exec(f"{away} echo begun; sleep 985; touch late", timeout_s=1.0)
        expect((result.outcome, result.exit_code, result.stdout) == ("timeout", None, b"begun\n"), result)
        expect(time.monotonic() - began < 8, "ending it took too long")
        expect(not await _running(machine, "sleep 98"), "something of it still runs")
        expect((await machine.exec("ls late; echo alive")).stdout == b"alive\n")
        for wrong in (0, -1, float("nan"), float("inf"), "5", None, True):
            try:
                await machine.exec("true", timeout_s=wrong)  # type: ignore[arg-type]
            except ValueError:
                continue
            raise AssertionError(f"timeout_s={wrong!r} was taken")


@check()
async def cancelling(bench: Bench) -> None:
    """A caller that is cancelled leaves nothing running, twelve at once."""
    async with bench.sandbox() as machine:
        tasks = [asyncio.ensure_future(machine.exec("sh -c 'trap \"\" TERM; sleep 984 & wait'")) for _ in range(12)]
        await asyncio.sleep(1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        expect(not await _running(machine, "sleep 984"), "something still runs")


@check(lambda found: found.background_processes)
async def background_processes(bench: Bench) -> None:
    """They and files live on from command to command, and do not hold one up."""
    async with bench.sandbox() as machine:
        began = time.monotonic()
        await machine.exec("echo one > kept; sleep 50 & echo $! > pid")
        expect(time.monotonic() - began < 5, "a background process held its command up")
        result = await machine.exec("cat kept; kill -0 $(cat pid) && echo alive")
        expect(result.stdout == b"one\nalive\n", result)


@check()
async def ending_everything(bench: Bench) -> None:
    """A command that kills all that it may kill ends itself, not the sandbox."""
    async with bench.sandbox() as machine:
        await machine.exec("kill -9 -1; sleep 1", timeout_s=20)
        expect((await machine.exec("echo alive")).stdout == b"alive\n", "the sandbox did not survive it")


@check()
async def quiescence(bench: Bench) -> None:
    """After it nothing of earlier commands runs, and commands work."""
    async with bench.sandbox() as machine:
        await machine.exec("(trap '' TERM; setsid sleep 983) & env -i setsid sleep 982 & sleep 981 &")
        await machine.quiesce()
        expect(not await _running(machine, "sleep 98"), "something still runs")


@check(lambda found: found.isolation != "none")
async def isolation(bench: Bench) -> None:
    """Neither this process's environment, nor its files, nor its processes are inside."""
    os.environ[_SECRET] = "hidden"
    with tempfile.NamedTemporaryFile(dir=Path.home(), prefix="miles-contract-") as ours:
        try:
            async with bench.sandbox() as machine:
                result = await machine.exec(f"env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; cat {ours.name}")
                expect("hidden" not in result.text, "the driver's environment is visible")
                expect("No such file" in result.text or result.exit_code != 0, "the driver's files are visible")
                told = await machine.exec(f"kill -0 {os.getpid()} 2>/dev/null; cat /proc/{os.getpid()}/cmdline")
                expect(b"contract" not in told.stdout and b"pytest" not in told.stdout, "its processes are visible")
        finally:
            os.environ.pop(_SECRET, None)


@check(lambda found: found.network_none)
async def network_off(bench: Bench) -> None:
    """Nothing but the loopback."""
    async with bench.sandbox(network="none") as machine:
        interfaces = await machine.exec("ls /sys/class/net 2>/dev/null || tail -n +3 /proc/net/dev")
        routes = await machine.exec("tail -n +2 /proc/net/route")
        expect(not routes.stdout.strip(), f"there are routes: {routes.text}")
        expect("eth" not in interfaces.text, f"there are interfaces: {interfaces.text}")


@check(lambda found: found.limits == "hard")
async def limits(bench: Bench) -> None:
    """Memory and the number of processes end; the sandbox does not."""
    async with bench.sandbox() as machine:
        grow = "a=0123456789abcdef; while :; do a=$a$a; done"
        result = await machine.exec(["sh", "-c", grow], timeout_s=60)
        expect(result.outcome in ("oom", "signal") or result.exit_code not in (0, None), result)
        result = await machine.exec("i=0; while [ $i -lt 500 ]; do sleep 60 & i=$((i+1)); done; wait", timeout_s=20)
        expect((await _running(machine, "sleep 60")) < 400, "hundreds of processes run")
        await machine.quiesce()
        expect((await machine.exec("echo alive")).stdout == b"alive\n")


@check(lambda found: found.users)
async def users(bench: Bench) -> None:
    """Commands of another user."""
    async with bench.sandbox(user="65534") as machine:
        expect((await machine.exec("id -u")).stdout == b"65534\n")


@check(lambda found: found.streams)
async def streams(bench: Bench) -> None:
    """A process that is talked to, and one that is ended."""
    async with bench.sandbox() as machine:
        process = await machine.spawn("echo ready; read word; echo $word >&2; exit 3")
        for command in (["env"], "exec env"):  # programs believe it, and what leads in came from elsewhere
            told = (await machine.exec(command, cwd="/tmp")).text.splitlines()
            expect(told.count("PWD=/tmp") == 1, told)
        parts: list[tuple[str, bytes]] = []
        async for name, data in process.output():
            parts.append((name, data))
            if len(parts) == 1:
                await process.write(b"hello\n")
        expect((parts, process.exit_code) == ([("stdout", b"ready\n"), ("stderr", b"hello\n")], 3), (parts, process))
        process = await machine.spawn(["sleep", "980"])
        await process.kill()
        expect((await asyncio.wait_for(process.wait(), 10)) < 0)


@check(lambda found: found.streams)
async def the_model_without_a_network(bench: Bench) -> None:
    """A connection from inside reaches what it may reach on this host, also after quiescence; nothing else listens."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"model:" + await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    async with server, bench.sandbox(network="none") as machine:
        port = await machine.reach(lambda: asyncio.open_connection(*address))
        ask = (
            "import socket,sys; s=socket.create_connection(('127.0.0.1',int(sys.argv[1]))); s.sendall(b'hi\\n'); "
            "print(s.makefile().read())"
        )
        for _ in range(2):
            result = await machine.exec(["python3", "-c", ask, str(port)])
            expect(result.stdout.strip() == b"model:hi", result)
            await machine.quiesce()
        result = await machine.exec(["python3", "-c", ask, str(address[1])])
        expect(result.exit_code != 0, "the host's own port is reachable")


@check(lambda found: found.streams and found.isolation != "none")
async def ports(bench: Bench) -> None:
    """A server inside, reached from this host."""
    async with bench.sandbox(files={"/workspace/page": b"served"}) as machine:
        await machine.spawn(["python3", "-m", "http.server", "8123", "--bind", "127.0.0.1"])
        port = await machine.forward(8123)
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /page HTTP/1.0\r\n\r\n")
            page = await reader.read()
            writer.close()
            if page.endswith(b"served"):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(page)


@check(lambda found: found.snapshot)
async def snapshots(bench: Bench) -> None:
    """Sandboxes begin where another one was, and go their own ways."""
    async with bench.sandbox() as machine:
        await machine.exec("mkdir d; echo kept > d/file; echo old > gone; rm gone")
        image = await machine.snapshot()
    async with bench.sandbox(image=image) as one, bench.sandbox(image=image) as other:
        expect((await one.exec("cat d/file; ls")).stdout == b"kept\nd\n")
        await one.exec("echo changed > d/file")
        expect((await other.exec("cat d/file")).stdout == b"kept\n")


@check()
async def endings(bench: Bench) -> None:
    """Destroying twice is well; a command afterwards tells that the sandbox is lost."""
    async with bench.sandbox() as machine:
        await machine.destroy()
        await machine.destroy()
        try:
            await machine.exec("true")
        except SandboxLost:
            return
        raise AssertionError("a command of a destroyed sandbox did not raise SandboxLost")


@check(lambda found: found.ttl and found.least_ttl_s <= 10)
async def time_to_live(bench: Bench) -> None:
    """A machine that nobody ends does it by itself."""
    async with bench.sandbox(ttl_s=max(2.0, bench.capabilities.least_ttl_s)) as machine:
        for _ in range(60):
            try:
                await machine.exec("true")
            except SandboxLost:
                return
            await asyncio.sleep(0.5)
        raise AssertionError("it lives on")


@check()
async def many_at_once(bench: Bench) -> None:
    """Eight sandboxes, each its own."""

    async def one(number: int) -> bytes:
        async with bench.sandbox(files={"/workspace/n": str(number).encode()}) as machine:
            return (await machine.exec("cat n")).stdout

    expect(await asyncio.gather(*map(one, range(8))) == [str(number).encode() for number in range(8)])


@check(lambda found: found.isolation in ("container", "microvm"))
async def orphans(bench: Bench) -> None:
    """A machine is listed with its labels; one whose owner is dead is ended by the reaper, others are not."""
    backend: Any = bench.backend
    owner = backend.owner
    async with bench.sandbox() as ours:
        listed = {info.id: info for info in await backend.machines()}
        expect(listed[ours.id].labels == {"miles": "contract"}, listed)
        backend.owner = f"1-1@{owner.partition('@')[2]}"
        try:
            orphan = await backend.create(bench.spec)
        finally:
            backend.owner = owner
        expect(await backend.reap() >= 1, "nothing was reaped")
        left = {info.id for info in await backend.machines()}
        expect(ours.id in left and orphan.id not in left, left)
        await orphan.destroy()


async def _running(machine: Sandbox, words: str) -> int:
    """Processes whose command line begins with these words."""
    script = """for p in /proc/[0-9]*; do tr '\\0' ' ' 2>/dev/null < "$p/cmdline"; echo; done"""
    lines = (await machine.exec(["sh", "-c", script])).text.splitlines()
    return sum(line.startswith(words) for line in lines)


async def _measure(bench: Bench) -> dict[str, float]:
    """Milliseconds, the median of a few."""
    times: dict[str, list[float]] = {name: [] for name in ("create", "exec", "write", "read", "destroy")}

    async def timed(name: str, work: Awaitable[Any]) -> Any:
        began = time.monotonic()
        result = await work
        times[name].append(1000 * (time.monotonic() - began))
        return result

    for _ in range(3):
        machine: Sandbox = await timed("create", bench.backend.create(bench.spec))
        try:
            for _ in range(10):
                await timed("exec", machine.exec(["true"]))
            await timed("write", machine.write("/tmp/a", b"x" * 1024))
            await timed("read", machine.read("/tmp/a"))
        finally:
            await timed("destroy", machine.destroy())
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


async def run_contract(
    backend: Backend,
    *,
    image: Image | None = None,
    only: Iterable[str] = (),
    leave_out: Iterable[str] = (),
    tell: Callable[[Found], None] = lambda found: None,
) -> Report:
    """Run the checks, one after the other. SandboxUnavailable when the backend cannot be used at all."""
    capabilities = await backend.probe()
    if image is not None:
        await backend.prepare(image)
    bench, left_out, chosen = Bench(backend, capabilities, image), set(leave_out), set(only)
    report = Report(backend.name, capabilities)
    for name, (function, needs) in CHECKS.items():
        if chosen and name not in chosen:
            continue
        began = time.monotonic()
        if name in left_out:
            found = Found(name, "left out", detail="as asked")
        elif not needs(capabilities):
            found = Found(name, "left out", detail="the backend says that it cannot")
        else:
            try:
                await asyncio.wait_for(function(bench), 180)
                found = Found(name, "ok", time.monotonic() - began)
            except (AssertionError, SandboxError, OSError, ValueError, TimeoutError) as error:
                detail = f"{type(error).__name__}: {error}"[:500]
                found = Found(name, "failed", time.monotonic() - began, detail)
        report.checks.append(found)
        tell(found)
    if not chosen:
        report.latencies_ms = await _measure(bench)
    return report
